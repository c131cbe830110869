/* The gate: a state word that those who wait sleep on, and striped counters of those inside. */
#define _GNU_SOURCE
#include "gate.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kiwi_preload.h"
#include "link.h"

/* In `state`. Open is 0: the fast path is one comparison. */
#define CLOSED 1u
#define ARMED 2u
#define CLOSING 4u /* waits for open captures to end; calls pass, new captures wait */

/* Threads count themselves in one of these, each in a cache line of its own: one counter for all would
 * travel between cores at every call. The low 16 bits count who is inside, the rest who ever was:
 * one addition serves both. A thread keeps its stripe, so no stripe ever falls below zero. */
#define STRIPES 16
#define INSIDE 0xffffull
#define ENTERED 0x10001ull

static struct {
    uint32_t state;
    uint32_t drained; /* a futex: changes when somebody leaves while the gate is shut */
    uint32_t asked;   /* the link was told that somebody waits for a lease */
    int32_t captures;
    uint32_t threads;
    struct {
        _Alignas(128) uint64_t count;
    } stripe[STRIPES];
} gate;

static __thread struct {
    uint8_t inside, aside, exempt, stripe; /* stripe: from 1; 0 is none yet */
} self __attribute__((tls_model("initial-exec")));

static void futex_wait(uint32_t *word, uint32_t seen, int64_t until_ns) {
    struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
    /* Returns early for signals, whose handlers have run by then; every caller looks again. */
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG, seen,
            until_ns == INT64_MAX ? NULL : &until, NULL, FUTEX_BITSET_MATCH_ANY);
}

static void futex_wake(uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, INT_MAX, NULL, NULL, 0);
}

static uint64_t *my_stripe(void) {
    if (__builtin_expect(self.stripe == 0, 0))
        self.stripe = 1 + __atomic_fetch_add(&gate.threads, 1, __ATOMIC_RELAXED) % STRIPES;
    return &gate.stripe[self.stripe - 1].count;
}

/* Whoever closes sets the state and then reads the counters; whoever enters counts and then reads the
 * state: one of the two sees the other. */
static void leave(uint64_t *stripe, uint64_t what) {
    __atomic_fetch_sub(stripe, what, __ATOMIC_SEQ_CST);
    if (__builtin_expect(__atomic_load_n(&gate.state, __ATOMIC_SEQ_CST) & (CLOSED | CLOSING), 0)) {
        __atomic_fetch_add(&gate.drained, 1, __ATOMIC_SEQ_CST);
        futex_wake(&gate.drained);
    }
}

static bool shut(uint32_t state, uint32_t for_me) {
    if ((state & for_me & ARMED) && __atomic_load_n(&gate.captures, __ATOMIC_SEQ_CST) > 0) state &= ~ARMED;
    return state & for_me;
}

/* Counts this thread once nothing of `for_me` shuts the gate. */
static __attribute__((noinline)) void wait_to_enter(uint64_t *stripe, uint64_t what, uint32_t for_me) {
    for (;;) {
        uint32_t state = __atomic_load_n(&gate.state, __ATOMIC_SEQ_CST);
        if (!shut(state, for_me)) {
            __atomic_fetch_add(stripe, what, __ATOMIC_SEQ_CST);
            if (!shut(__atomic_load_n(&gate.state, __ATOMIC_SEQ_CST), for_me)) return;
            leave(stripe, what);
            continue;
        }
        if ((state & for_me & ARMED) && !__atomic_exchange_n(&gate.asked, 1, __ATOMIC_SEQ_CST))
            kp_link_want_lease();
        futex_wait(&gate.state, state, INT64_MAX);
    }
}

static bool enter(uint32_t for_me) {
    if (self.inside | self.exempt) return false;
    uint64_t *stripe = my_stripe();
    __atomic_fetch_add(stripe, ENTERED, __ATOMIC_SEQ_CST);
    if (__builtin_expect(__atomic_load_n(&gate.state, __ATOMIC_SEQ_CST) != 0, 0)) {
        leave(stripe, ENTERED);
        wait_to_enter(stripe, ENTERED, for_me);
    }
    self.inside = 1;
    return true;
}

bool kp_gate_enter(void) { return enter(CLOSED | ARMED); }
bool kp_gate_enter_capture(void) { return enter(CLOSED | ARMED | CLOSING); }

void kp_gate_leave(bool entered) {
    if (!entered) return;
    self.inside = 0;
    leave(my_stripe(), 1);
}

void kp_gate_stand_aside(bool out) {
    if (!self.inside || self.aside == out) return;
    self.aside = out;
    if (out) leave(my_stripe(), 1);
    else wait_to_enter(my_stripe(), 1, CLOSED);
}

void kp_gate_exempt(void) { self.exempt = 1; }

/* ---- the pager's side ----------------------------------------------------------------------------- */

unsigned kp_gate_inside(void) {
    uint64_t sum = 0;
    for (int i = 0; i < STRIPES; i++) sum += __atomic_load_n(&gate.stripe[i].count, __ATOMIC_SEQ_CST) & INSIDE;
    return (unsigned)sum;
}

uint64_t kp_gate_passed(void) {
    uint64_t sum = 0;
    for (int i = 0; i < STRIPES; i++) sum += __atomic_load_n(&gate.stripe[i].count, __ATOMIC_RELAXED) >> 16;
    return sum;
}

static bool nobody_inside(void) { return kp_gate_inside() == 0; }
static bool no_capture(void) { return __atomic_load_n(&gate.captures, __ATOMIC_SEQ_CST) == 0; }

static bool wait_until(bool (*come)(void), int64_t until_ns) {
    for (;;) {
        uint32_t seen = __atomic_load_n(&gate.drained, __ATOMIC_SEQ_CST);
        if (come()) return true;
        if (kp_now_ns() >= until_ns) return false;
        futex_wait(&gate.drained, seen, until_ns);
    }
}

static void clear(uint32_t bits) {
    __atomic_fetch_and(&gate.state, ~bits, __ATOMIC_SEQ_CST);
    futex_wake(&gate.state);
}

bool kp_gate_close(int64_t until_ns) {
    if (kp_gate_is_closed()) return true;
    __atomic_fetch_or(&gate.state, CLOSING, __ATOMIC_SEQ_CST);
    while (wait_until(no_capture, until_ns)) {
        __atomic_fetch_or(&gate.state, CLOSED, __ATOMIC_SEQ_CST);
        if (!wait_until(nobody_inside, until_ns)) break;
        if (no_capture()) { /* none began between the two */
            __atomic_fetch_and(&gate.state, ~CLOSING, __ATOMIC_SEQ_CST);
            return true;
        }
        clear(CLOSED);
    }
    clear(CLOSED | CLOSING);
    return false;
}

void kp_gate_open(void) {
    __atomic_store_n(&gate.asked, 0, __ATOMIC_SEQ_CST); /* armed still: who waits asks again */
    clear(CLOSED);
}

void kp_gate_arm(bool armed) {
    if (!armed) {
        clear(ARMED);
        return;
    }
    __atomic_store_n(&gate.asked, 0, __ATOMIC_SEQ_CST);
    __atomic_fetch_or(&gate.state, ARMED, __ATOMIC_SEQ_CST);
    futex_wake(&gate.state); /* who waits at the closed gate must ask */
}

bool kp_gate_is_closed(void) { return __atomic_load_n(&gate.state, __ATOMIC_SEQ_CST) & CLOSED; }
bool kp_gate_is_armed(void) { return __atomic_load_n(&gate.state, __ATOMIC_SEQ_CST) & ARMED; }

bool kp_gate_capturing(void) { return !no_capture(); }

void kp_gate_captures(int more) {
    __atomic_fetch_add(&gate.captures, more, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&gate.drained, 1, __ATOMIC_SEQ_CST);
    futex_wake(&gate.drained);
}

void kp_gate_reset(void) {
    memset(&gate, 0, sizeof gate);
    memset(&self, 0, sizeof self);
}
