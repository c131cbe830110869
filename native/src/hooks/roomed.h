/* For wrappers of calls that take GPU memory. */
#ifndef KP_ROOMED_H
#define KP_ROOMED_H

#include "base/real.h"
#include "hooks/hooks.h"
#include "owner/blocks.h"
#include "owner/room.h"

/* Return whether it is the GPU whose memory is owned. */
static inline bool kp_here(CUdevice device) {
    return __atomic_load_n(&kp_gpu.known, __ATOMIC_ACQUIRE) && device == kp_gpu.device;
}

static inline bool kp_current_is_here(void) {
    CUdevice device;
    return kp_real.cuCtxGetDevice(&device) == CUDA_SUCCESS && kp_here(device);
}

/* Makes a `call` that takes about `bytes_` of GPU memory: if there is none, asks the daemon for room, as for owned
 * memory. A call from inside another does not ask: the driver holds locks of its own then. (`call` can see that: `entered_`
 * is false.) `class_` is KP_GATED, perhaps with KP_REFUSABLE. */
#define ROOMED(class_, result, bytes_, here_, call)                                                  \
    do {                                                                                             \
        bool entered_;                                                                               \
        result = KP_INTERRUPTED;                                                                     \
        if (!kp_enter_class(class_, &entered_)) break;                                              \
        struct kp_room room_ = {.asks = entered_ && kp_owning()};                                    \
        while ((result = (call)) == CUDA_ERROR_OUT_OF_MEMORY) {                                      \
            room_.bytes = (bytes_); /* read only now: the driver has judged the arguments */         \
            room_.elsewhere = !(here_);                                                              \
            if (!kp_room_again(&room_, result)) break;                                               \
        }                                                                                            \
        kp_gate_leave(entered_);                                                                     \
    } while (0)

#endif
