/* Who may enter the driver, and when.
 *
 * Calls that submit work, allocate or inspect device pointers pass the gate; waits, queries and frees
 * do not. Open, a passage costs a store and a load each way. Two things shut it:
 *   closed  the pager moves memory. Closing waits until nobody is inside and no capture is open.
 *   armed   the session has no lease: the next call asks for one and waits. Nothing is drained.
 * A thread at the gate sleeps in the kernel, with every lock and the GIL that its program holds: to
 * hand them back would break the program's order of locks.
 */
#ifndef KP_GATE_H
#define KP_GATE_H

#include <stdbool.h>
#include <stdint.h>

/* Before a gated call. Waits while the gate is shut. False: this call is not counted (it is nested in
 * one that is, the thread is exempt, or the library is disabled); hand the answer to kp_gate_leave. */
bool kp_gate_enter(void);
void kp_gate_leave(bool entered);

/* A thread inside that waits for room is not in flight: true un-counts it, false counts it again,
 * waiting while the gate is closed. Without effect for a thread that is not inside. */
void kp_gate_stand_aside(bool out);

/* This thread passes the gate always, uncounted: the pager and its helpers. */
void kp_gate_exempt(void);

/* The pager thread only. Shuts the gate and waits until nobody is inside and no capture is open.
 * False at until_ns (CLOCK_MONOTONIC): the gate is as it was before. True if it was closed already. */
bool kp_gate_close(int64_t until_ns);
/* Opens, or goes back to armed if kp_gate_arm(true) was the last word. */
void kp_gate_open(void);
void kp_gate_arm(bool armed);
bool kp_gate_is_closed(void);
bool kp_gate_is_armed(void);

/* Calls let through so far. */
uint64_t kp_gate_passed(void);
/* Threads inside now, and for an instant those that find the gate shut. */
unsigned kp_gate_inside(void);

/* captures.c only: stream captures. While one is open the gate does not close, and being armed holds
 * nobody up, or the capture could not end. A new one waits while a close is under way. */
bool kp_gate_enter_capture(void);
void kp_gate_captures(int more);
bool kp_gate_capturing(void); /* one is open: whoever synchronises now breaks it */

/* start.c only: once, when libcuda was found; and in a forked child, whose other threads are gone. */
void kp_gate_prepare(void);
void kp_gate_reset(void);

#endif
