/* Who may enter the driver, and when.
 *
 * Every call is counted while it is in the driver. *Gated* calls submit work, allocate or look through
 * device pointers; the *others* are waits, questions, frees and the rest. Open, a passage costs a store
 * and a load each way. Three things hold calls up:
 *   armed   the session has no lease: the next gated call asks for one and waits. Nothing is drained.
 *   closed  gated calls wait. Closing waits until no gated call is inside and no capture is open; what
 *           is under way can end, because waits pass.
 *   shut    closed, and every other call waits, too. Shutting waits until no thread is in the driver.
 *           From here the driver may take the process. Whoever waits asks for the lease.
 * A thread at the gate sleeps in the kernel, with every lock and the GIL that its program holds: to
 * hand them back would break the program's order of locks.
 */
#ifndef KP_GATE_H
#define KP_GATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tested.h"

/* Before a gated call. Waits while the gate is shut. False: this call is not counted (it is nested in
 * one that is, the thread is exempt, or the library is disabled); hand the answer to kp_gate_leave. */
bool kp_gate_enter(void);
/* Before any other call. Waits only while the gate is shut. */
bool kp_gate_enter_other(void);
void kp_gate_leave(bool entered);

/* A thread inside that waits for room is not in flight: true un-counts it, false counts it again,
 * waiting while the gate is closed. Without effect for a thread that is not inside. */
void kp_gate_stand_aside(bool out);

/* This thread passes the gate always, uncounted: the pager and its helpers. */
void kp_gate_exempt(void);

/* The pager thread only. Closes the gate and waits until no gated call is inside and no capture is open.
 * False at until_ns (CLOCK_MONOTONIC): the gate is as it was before. True if it was closed already. */
bool kp_gate_close(int64_t until_ns);
/* Of a closed gate: holds every call, and waits until no thread is in the driver. False at until_ns: it
 * is only closed, as before. */
bool kp_gate_shut(int64_t until_ns);
/* Opens, or goes back to armed if kp_gate_arm(true) was the last word. */
void kp_gate_open(void);
void kp_gate_arm(bool armed);
bool kp_gate_is_closed(void);
bool kp_gate_is_shut(void);
bool kp_gate_is_armed(void);
/* A new daemon has heard no wish yet: whoever is held asks for the lease once more. */
void kp_gate_ask_again(void);

/* Threads in a gated call now, and for an instant those that find the gate closed; and in any call. */
unsigned kp_gate_inside(void);
unsigned kp_gate_inside_any(void);

/* captures.c only: stream captures. While one is open the gate does not close, and being armed holds
 * nobody up, or the capture could not end. A new one waits while a close is under way. */
bool kp_gate_enter_capture(void);
void kp_gate_captures(int more);
bool kp_gate_capturing(void); /* one is open: whoever synchronises now breaks it */

/* ---- the fast way, inlined into the generated wrappers ---- */

enum { KP_OUTSIDE, KP_GATED, KP_OTHER };

/* In `kp_gate_state`. 0: the fast way for every call. */
enum {
    KP_GATE_CLOSED = 1,
    KP_GATE_ARMED = 2,
    KP_GATE_CLOSING = 4, /* waits for open captures to end; calls pass, new captures wait */
    KP_GATE_SLOW = 8,    /* no membarrier here */
    KP_GATE_SHUT = 16,   /* together with KP_GATE_CLOSED */
};

struct kp_seat { /* of one thread; says whether it is inside, and in which kind of call */
    _Alignas(64) uint32_t inside;
    uint32_t taken;
};
extern uint32_t kp_gate_state;
/* This thread's seat while it stands outside; NULL: inside, exempt, without a seat, or not its own. */
extern __thread struct kp_seat *kp_gate_seat __attribute__((tls_model("initial-exec")));
void kp_gate_left(void); /* wakes who waits for that */

/* NULL: nothing has happened, kp_gate_enter or kp_gate_enter_other knows why. Else the call is counted; then
 * kp_gate_step_out. `kind` is a constant. */
static inline __attribute__((always_inline)) struct kp_seat *kp_gate_step_in(uint32_t kind) {
    struct kp_seat *seat = kp_gate_seat;
    if (__builtin_expect(!seat, 0)) return NULL;
    kp_gate_seat = NULL;
    __atomic_signal_fence(__ATOMIC_SEQ_CST); /* a signal handler that calls in between must not free the seat */
    const uint32_t minds = kind == KP_GATED ? UINT32_MAX : KP_GATE_SHUT | KP_GATE_SLOW;
    __atomic_store_n(&seat->inside, kind, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST); /* the closer makes the barrier that belongs here */
    if (__builtin_expect((__atomic_load_n(&kp_gate_state, __ATOMIC_ACQUIRE) & minds) != 0, 0)) {
        /* A closer that saw it is woken by `enter`, which sits down and gets up once more. */
        __atomic_store_n(&seat->inside, 0, __ATOMIC_RELEASE);
        kp_gate_seat = seat;
        return NULL;
    }
    if (kind == KP_GATED) kp_count_passage();
    return seat;
}

static inline __attribute__((always_inline)) void kp_gate_step_out(struct kp_seat *seat) {
    __atomic_store_n(&seat->inside, 0, __ATOMIC_RELEASE);
    kp_gate_seat = seat;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    if (__builtin_expect(__atomic_load_n(&kp_gate_state, __ATOMIC_ACQUIRE) != 0, 0)) kp_gate_left();
}

/* start.c only: once, when libcuda was found; and in a forked child, whose other threads are gone. */
void kp_gate_prepare(void);
void kp_gate_reset(void);

#endif
