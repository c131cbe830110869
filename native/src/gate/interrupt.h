/* Ends the wait of a call at the gate when the user interrupts the cell that it belongs to.
 *
 * In a notebook SIGINT means "end this cell". Python's own handler only notes that, and Python acts on it when the call
 * that it is in returns: at the gate that may take minutes. So a call that may fail without harm is refused there. */
#ifndef KP_INTERRUPT_H
#define KP_INTERRUPT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/kiwi_preload.h"

#define KP_INTERRUPTED 46 /* CUDA_ERROR_DEVICE_UNAVAILABLE: "busy or unavailable at the current time"; no framework tries again */

/* Has SIGINT refuse calls from now on. `later` is Py_AddPendingCall: it has the main thread call a function between two
 * instructions of Python, may be called by any thread, and returns 0 if it will. NULL: none is refused any more. */
KP_API void kiwi_preload_interruptible(int (*later)(int (*)(void *), void *));

/* The wait of one call. It is on the stack of its thread, and nobody else knows it. */
struct kp_hold {
    bool refusable, main;
    uint32_t seen;    /* interrupts that do not concern it */
    uint32_t heard;   /* how many it has heard of since, */
    int64_t heard_ns; /* and when; 0: of none */
};
struct kp_hold kp_hold_begin(bool refusable);
bool kp_hold_is_over(struct kp_hold *hold); /* whether the call must be refused */
int64_t kp_hold_look_ns(const struct kp_hold *hold); /* after which time to look again, at the latest */

#endif
