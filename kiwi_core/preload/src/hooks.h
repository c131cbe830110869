/* For wrappers by hand (hooks_*.c), which define the driver's own names, every form of them. */
#ifndef KP_HOOKS_H
#define KP_HOOKS_H

#define __CUDA_API_VERSION_INTERNAL /* cuda.h declares every form under its exported name */
#include <cuda.h>

#include "calls.h"
#include "gate.h"
#include "kiwi_preload.h"
#include "own.h"

/* The driver's own `name`, or the wrapper's answer where there is none. */
#define DRIVER(name)                                                                                 \
    __typeof__(&name) real = (__typeof__(&name))kp_real_of(KP_AT_##name);                            \
    if (!real) return kp_missing()
#define GATED(result, call)                                                                          \
    do {                                                                                             \
        bool entered_ = kp_gate_enter();                                                             \
        result = (call);                                                                             \
        kp_gate_leave(entered_);                                                                     \
    } while (0)

/* The same for calls of the classes free, wait and never. */
#define COUNTED(result, call)                                                                        \
    do {                                                                                             \
        bool entered_ = kp_gate_enter_other();                                                       \
        result = (call);                                                                             \
        kp_gate_leave(entered_);                                                                     \
    } while (0)

/* A whole wrapper: `call` goes through the gate as GATED, COUNTED or the like say; then come the rest. */
#define HOOK(gate, name, params, call, ...)                                                          \
    KP_API CUresult name params {                                                                    \
        DRIVER(name);                                                                                \
        CUresult result;                                                                             \
        gate(result, call);                                                                          \
        __VA_ARGS__;                                                                                 \
        return result;                                                                               \
    }

CUresult kp_missing(void);

/* captures.c: after the driver's answer. */
void kp_capture_begun(CUstream stream);
void kp_capture_ended(CUstream stream); /* perhaps: asks the driver */
void kp_capture_dropped(CUstream stream);

/* hooks_foreign.c: memory that Kiwi cannot own, by its address or handle. */
void kp_foreign_came(enum kp_foreign kind, uint64_t key, uint64_t bytes);
bool kp_foreign_gone(enum kp_foreign kind, uint64_t key); /* false: it never came */

#endif
