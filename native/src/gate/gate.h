/* The gate: which calls may enter the driver, and when.
 *
 * Every call is counted while it is in the driver. *Gated* calls submit work, allocate or look through
 * device pointers; the *others* are waits, queries, frees and the rest. While the gate is open, a call costs
 * a store and a load each way. Three states hold calls up:
 *   armed   The session has no lease: the next gated call asks for one and waits. Nothing is drained.
 *   closed  Gated calls wait. Closing waits until no gated call is inside and no capture is open; work
 *           under way can end, because waits pass.
 *   shut    Closed, and every other call waits, too. Shutting waits until no thread is in the driver.
 *           From then on the driver may take the process. As at an armed gate, a call that waits asks for the
 *           lease.
 * NVML's calls are none of the driver's, and pass all of these. They wait while the gate is *taken*: the driver may
 * have the process, and would not let them return. A thread that waits there asks for the context, which needs less
 * than the lease.
 * A thread at the gate sleeps in the kernel and keeps every lock that it holds, and the GIL: releasing them
 * would break the program's order of locks.
 */
#ifndef KP_GATE_H
#define KP_GATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/tested.h"

/* Enters a gated call; waits while the gate is armed, closed or shut. Returns false if the call is not counted:
 * it is nested in a counted call, or the thread is exempt. Pass the result to kp_gate_leave. */
bool kp_gate_enter(void);
/* Enters any other call; waits only while the gate is shut. */
bool kp_gate_enter_other(void);
void kp_gate_leave(bool entered);
/* Enter and leave a call of NVML. Entering waits while the gate is taken. */
void kp_gate_enter_nvml(void);
void kp_gate_leave_nvml(void);

/* Takes a thread that waits for room out of the count, as if its call had ended: a signal handler may leave the wait by
 * siglongjmp(). Returns false if the thread is not counted. Otherwise kp_gate_come_back counts it again, waiting
 * while the gate is closed. */
bool kp_gate_stand_aside(void);
void kp_gate_come_back(void);

/* Lets this thread always pass the gate, uncounted: for the pager and its helpers. */
void kp_gate_exempt(void);

/* Closes the gate and waits until no gated call is inside and no capture is open. Returns false at until_ns
 * (CLOCK_MONOTONIC), with the gate as it was before; true if the gate was already closed. For the pager thread
 * only. */
bool kp_gate_close(int64_t until_ns);
/* Shuts a closed gate: holds every call, and waits until no thread is in the driver. Returns false at until_ns,
 * with the gate only closed, as before. */
bool kp_gate_shut(int64_t until_ns);
/* Lets the driver have the process: holds calls of NVML, and waits for those that are inside, until `until_ns` and at
 * most a second, since the driver waits for them, too. kp_gate_take_back, and opening the gate, end that. */
void kp_gate_take(int64_t until_ns);
void kp_gate_take_back(void);
bool kp_gate_is_taken(void);
/* Opens the gate, or returns it to armed if the last kp_gate_arm was true. */
void kp_gate_open(void);
void kp_gate_arm(bool armed);
/* Returns whether no gated call is inside, and none can enter before `*epoch` changes. For the pager thread only. */
bool kp_gate_is_still(uint64_t *epoch);
/* Notes that the program has found a function that may write to GPU memory past an armed gate: it is never still again. */
void kp_gate_is_leaky(void);
uint64_t kp_gate_epoch(void); /* changes before an armed gate lets calls pass; never 0 */
bool kp_gate_is_closed(void);
bool kp_gate_is_shut(void);
bool kp_gate_is_armed(void);
/* Lets threads that are held up ask for the lease again: a new daemon has heard no request yet. */
void kp_gate_ask_again(void);
void kp_gate_wake(void); /* lets them look again; for a signal handler, too */

/* Return the number of threads in a gated call, and in any call. Both may include, for an instant, threads that
 * are finding the gate closed. */
unsigned kp_gate_inside(void);
unsigned kp_gate_inside_any(void);

/* Count stream captures; for captures.c only. While a capture is open the gate does not close, and an armed
 * gate holds no call up, or the capture could not end. A new capture waits while a close is under way. */
bool kp_gate_enter_capture(void);
void kp_gate_captures(int more);
bool kp_gate_capturing(void); /* true: a capture is open, which a synchronising call would break */

/* ---- the fast path, inlined into the generated wrappers ---- */

enum { KP_OUTSIDE, KP_GATED, KP_OTHER };

/* Bits of `kp_gate_state`. At 0, every call takes the fast path. */
enum {
    KP_GATE_CLOSED = 1,
    KP_GATE_ARMED = 2,
    KP_GATE_CLOSING = 4, /* a close waits for open captures to end; calls pass, new captures wait */
    KP_GATE_SLOW = 8,    /* this kernel has no membarrier */
    KP_GATE_SHUT = 16,   /* together with KP_GATE_CLOSED */
    KP_GATE_TAKEN = 32,  /* together with KP_GATE_SHUT; only calls of NVML mind it */
};

/* Enters a call of this kind that may fail without harm: returns false if it is refused, because the user has interrupted
 * its wait (interrupt.h). Its result is KP_INTERRUPTED then, and there is nothing to leave. `*entered` is what kp_gate_enter
 * returns. */
bool kp_gate_enter_refusable(uint32_t kind, bool *entered);

struct kp_seat { /* says whether a thread is inside, and in which kind of call */
    _Alignas(64) uint32_t inside;
    uint32_t taken;
};
extern uint32_t kp_gate_state;
/* This thread's seat while the thread is outside; NULL: it is inside, exempt, or has no seat of its own. */
extern __thread struct kp_seat *kp_gate_seat __attribute__((tls_model("initial-exec")));
void kp_gate_left(void); /* wakes the closer that waits for threads to leave */

/* Counts the call and returns the seat for kp_gate_step_out. Returns NULL with nothing counted if the call
 * cannot take the fast path: call kp_gate_enter or kp_gate_enter_other then. `kind` is a constant. */
static inline __attribute__((always_inline)) struct kp_seat *kp_gate_step_in(uint32_t kind) {
    struct kp_seat *seat = kp_gate_seat;
    if (__builtin_expect(!seat, 0)) return NULL;
    kp_gate_seat = NULL;
    __atomic_signal_fence(__ATOMIC_SEQ_CST); /* a signal handler that calls here must not free the seat */
    const uint32_t minds = kind == KP_GATED ? UINT32_MAX : KP_GATE_SHUT | KP_GATE_SLOW;
    __atomic_store_n(&seat->inside, kind, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST); /* the closer makes the barrier that belongs here */
    if (__builtin_expect((__atomic_load_n(&kp_gate_state, __ATOMIC_ACQUIRE) & minds) != 0, 0)) {
        /* If a closer saw the seat taken, `enter` wakes it: it takes the seat and leaves it once more. */
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

/* For start.c only: prepare once, when libcuda is found; reset in a forked child, which has no other threads. */
void kp_gate_prepare(void);
void kp_gate_reset(void);

#endif
