/* For hand-written wrappers (hooks_*.c), which define every form of the driver's own names. */
#ifndef KP_HOOKS_H
#define KP_HOOKS_H

#define __CUDA_API_VERSION_INTERNAL /* cuda.h declares every form under its exported name */
#include <cuda.h>

#include "base/kiwi_preload.h"
#include "gate/gate.h"
#include "hooks/calls.h"
#include "owner/own.h"

/* Declares `real`, the driver's own `name`; without one, returns the error from the wrapper. */
#define DRIVER(name)                                                                                 \
    kp_check_fork();                                                                                 \
    __typeof__(&name) real = (__typeof__(&name))kp_real_of(KP_AT_##name);                            \
    if (!real) return kp_missing()
#define GATED(result, call)                                                                          \
    do {                                                                                             \
        bool entered_ = kp_gate_enter();                                                             \
        result = (call);                                                                             \
        kp_gate_leave(entered_);                                                                     \
    } while (0)

/* Like GATED, for calls that an interrupt may refuse. */
#define REFUSABLE(result, call)                                                                      \
    do {                                                                                             \
        bool entered_;                                                                               \
        result = KP_INTERRUPTED;                                                                     \
        if (!kp_gate_enter_refusable(KP_GATED, &entered_)) break;                                              \
        result = (call);                                                                             \
        kp_gate_leave(entered_);                                                                     \
    } while (0)

/* Like GATED, for calls of the classes free, wait and never. */
#define COUNTED(result, call)                                                                        \
    do {                                                                                             \
        bool entered_ = kp_gate_enter_other();                                                       \
        result = (call);                                                                             \
        kp_gate_leave(entered_);                                                                     \
    } while (0)

/* Defines a whole wrapper: `call` goes through the gate by `gate` (GATED, COUNTED or the like); then the
 * remaining arguments run as statements. */
#define HOOK(gate, name, params, call, ...)                                                          \
    KP_API CUresult name params {                                                                    \
        DRIVER(name);                                                                                \
        CUresult result;                                                                             \
        gate(result, call);                                                                          \
        __VA_ARGS__;                                                                                 \
        return result;                                                                               \
    }

CUresult kp_missing(void);

/* captures.c: called after the driver's answer. */
void kp_capture_begun(CUstream stream);
void kp_capture_ended(CUstream stream); /* asks the driver whether the capture has ended */
void kp_capture_dropped(CUstream stream);

#endif
