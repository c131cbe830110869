/* The gate: a state word that waiting threads sleep on, and a seat for each thread, which says whether the
 * thread is inside.
 *
 * A thread that enters takes its seat and then reads the state; the closer sets the state and then reads the
 * seats. One of the two must see the other, so each needs a full barrier between its two steps. The barrier
 * would be most of the cost of entering, and closing is rare: the closer makes the barrier for all threads
 * (membarrier(2)), and entering is a store and a load. Where the kernel cannot do that, the state is never 0,
 * and every call takes the slow path, which has a barrier of its own.
 */
#define _GNU_SOURCE
#include "gate/gate.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/daemon.h"
#include "base/kiwi_preload.h"
#include "gate/interrupt.h"

#define CLOSED ((uint32_t)KP_GATE_CLOSED)
#define ARMED ((uint32_t)KP_GATE_ARMED)
#define CLOSING ((uint32_t)KP_GATE_CLOSING)
#define SLOW ((uint32_t)KP_GATE_SLOW)
#define SHUT ((uint32_t)KP_GATE_SHUT)
#define TAKEN ((uint32_t)KP_GATE_TAKEN)

/* From <linux/membarrier.h>, which old systems lack. */
#define MEMBARRIER_EXPEDITED (1 << 3)
#define MEMBARRIER_REGISTER_EXPEDITED (1 << 4)

/* A thread that is about to sleep when kp_gate_ask_again is called would not ask; so it looks again. */
#define ASK_NS 1000000000ll /* also in interrupt.c */
#define OTHERS_ASK_NS 2000000l

#define NVML_NS 1000000000ll /* a signal handler may have left a call of NVML by siglongjmp(): it counts for ever */

#define SEATS 1024 /* threads that use the GPU at the same time; further threads share one counter, which is slower */

static struct {
    uint32_t drained; /* a futex: changes when a thread leaves while the gate is closed or closing */
    uint32_t asked;   /* the link knows that a thread waits for the lease */
    uint32_t context_asked; /* the link knows that a thread waits for the context */
    uint32_t in_nvml;       /* counts threads in a call of NVML */
    int32_t captures;
    uint32_t seats; /* every seat that was ever taken has a lower index */
    struct kp_seat standing; /* for threads without a seat: `inside` counts those in a gated call */
    uint32_t standing_other; /* counts threads without a seat in another call */
    struct kp_seat seat[SEATS];
} gate;

uint32_t kp_gate_state __attribute__((aligned(64))) = SLOW; /* a futex */

__thread struct kp_seat *kp_gate_seat __attribute__((tls_model("initial-exec")));
static __thread struct {
    struct kp_seat *seat; /* the thread's own, or the standing one; NULL: none yet */
    uint8_t standing;     /* KP_GATED, KP_OTHER: the thread is inside, without a seat of its own */
    uint8_t exempt;
} self __attribute__((tls_model("initial-exec")));

static pthread_key_t leaving; /* its destructor gives the seat back */
static bool seats_come_back;

static void futex_wait(uint32_t *word, uint32_t seen, int64_t until_ns) {
    struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
    /* Returns early for signals, whose handlers have run by then; every caller checks again. */
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG, seen,
            until_ns == INT64_MAX ? NULL : &until, NULL, FUTEX_BITSET_MATCH_ANY);
}

static void futex_wake(uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, INT_MAX, NULL, NULL, 0);
}

#define GET(what) __atomic_load_n(&(what), __ATOMIC_SEQ_CST)

/* ---- seats ---------------------------------------------------------------------------------------- */

static void give_back(void *seat) {
    struct kp_seat *mine = seat;
    if (self.seat == mine && !kp_gate_seat && !self.exempt) { /* the thread was cancelled inside, and is out now */
        __atomic_store_n(&mine->inside, 0, __ATOMIC_RELEASE);
        kp_gate_left();
    }
    self.seat = kp_gate_seat = NULL;
    __atomic_store_n(&mine->taken, 0, __ATOMIC_RELEASE);
}

static __attribute__((noinline)) struct kp_seat *find_seat(void) {
    struct kp_seat *found = &gate.standing;
    for (uint32_t i = 0; i < SEATS && found == &gate.standing; i++) {
        uint32_t before = 0, seats = GET(gate.seats);
        if (GET(gate.seat[i].taken) || !__atomic_compare_exchange_n(&gate.seat[i].taken, &before, 1, false,
                                                                    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue;
        while (seats <= i && !__atomic_compare_exchange_n(&gate.seats, &seats, i + 1, false, __ATOMIC_SEQ_CST,
                                                          __ATOMIC_SEQ_CST))
            continue;
        found = &gate.seat[i];
    }
    self.seat = found;
    if (found == &gate.standing) return found;
    kp_gate_seat = found;
    if (GET(seats_come_back)) pthread_setspecific(leaving, found);
    return found;
}

static inline struct kp_seat *my_seat(void) {
    return __builtin_expect(self.seat != NULL, 1) ? self.seat : find_seat();
}

__attribute__((cold)) void kp_gate_left(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (GET(kp_gate_state) & (CLOSED | CLOSING)) {
        __atomic_fetch_add(&gate.drained, 1, __ATOMIC_SEQ_CST);
        futex_wake(&gate.drained);
    }
}

static inline uint32_t *standing(uint32_t kind) {
    return kind == KP_GATED ? &gate.standing.inside : &gate.standing_other;
}

/* Notes for this thread where it is, before its seat says so: a signal handler that calls here must not free the seat. */
static inline void note(struct kp_seat *seat, uint32_t where) {
    bool own = __builtin_expect(seat != &gate.standing, 1);
    kp_gate_seat = own && where == KP_OUTSIDE ? seat : NULL;
    self.standing = own ? 0 : (uint8_t)where;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

static inline void sit(struct kp_seat *seat, uint32_t kind) {
    note(seat, kind);
    if (__builtin_expect(seat != &gate.standing, 1)) __atomic_store_n(&seat->inside, kind, __ATOMIC_RELAXED);
    else __atomic_fetch_add(standing(kind), 1, __ATOMIC_SEQ_CST);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

static inline void rise(struct kp_seat *seat, uint32_t kind) {
    note(seat, KP_OUTSIDE);
    if (__builtin_expect(seat != &gate.standing, 1)) __atomic_store_n(&seat->inside, 0, __ATOMIC_RELEASE);
    else __atomic_fetch_sub(standing(kind), 1, __ATOMIC_SEQ_CST);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    if (__builtin_expect(__atomic_load_n(&kp_gate_state, __ATOMIC_ACQUIRE) == 0, 1)) return;
    kp_gate_left();
}

/* ---- the program's side ---------------------------------------------------------------------------- */

static bool held_up(uint32_t state, uint32_t minds) {
    if ((state & minds & ARMED) && GET(gate.captures) > 0) state &= ~ARMED;
    return state & minds;
}

static uint32_t kind_of(uint32_t minds) { return minds == SHUT ? KP_OTHER : KP_GATED; }

/* Takes the seat once none of the state bits in `minds` holds the thread up. Returns false, without the seat, if the user
 * has interrupted the wait of a call that may be `refusable`. */
static __attribute__((noinline)) bool wait_to_enter(struct kp_seat *seat, uint32_t minds, bool refusable) {
    struct kp_hold hold = {0};
    for (bool held = false;; held = true) {
        uint32_t state = GET(kp_gate_state);
        if (!held_up(state, minds)) {
            sit(seat, kind_of(minds));
            __atomic_thread_fence(__ATOMIC_SEQ_CST);
            if (!held_up(GET(kp_gate_state), minds)) return true;
            rise(seat, kind_of(minds));
            continue;
        }
        if (!held) hold = kp_hold_begin(refusable);
        if (kp_hold_is_over(&hold)) {
            kp_gate_ask_again(); /* whoever else waits asks anew, so that the request is not taken back */
            nanosleep(&(struct timespec){.tv_nsec = OTHERS_ASK_NS}, NULL);
            if (!GET(gate.asked)) kp_daemon_want_lease(false);
            return false;
        }
        /* A shut gate counts, too: the program's memory may be out, and nothing else asks for the lease. Only a thread
         * that waits asks: nothing counts them, because a signal handler may leave the wait by siglongjmp(). */
        if ((state & (ARMED | SHUT)) && !__atomic_exchange_n(&gate.asked, 1, __ATOMIC_SEQ_CST))
            kp_daemon_want_lease(true);
        futex_wait(&kp_gate_state, state, kp_now_ns() + kp_hold_look_ns(&hold));
    }
}

/* Returns whether the calling thread is inside, or passes as freely as if it were. */
static bool counted(void) {
    if (self.exempt || self.standing) return true;
    return self.seat && self.seat != &gate.standing && !kp_gate_seat;
}

/* Sets `*entered` to whether the call is counted. Returns false if it is refused. */
static bool enter(uint32_t minds, bool refusable, bool *entered) {
    kp_check_fork(); /* the gate of a parent may have been closed */
    *entered = false;
    if (counted()) return true;
    struct kp_seat *seat = my_seat();
    uint32_t kind = kind_of(minds);
    sit(seat, kind);
    if (__atomic_load_n(&kp_gate_state, __ATOMIC_ACQUIRE) != 0) {
        rise(seat, kind);
        if (!wait_to_enter(seat, minds, refusable)) return false;
    }
    if (kind == KP_GATED) kp_count_passage();
    return *entered = true;
}

static bool entered(uint32_t minds) {
    bool counted_;
    enter(minds, false, &counted_);
    return counted_;
}

bool kp_gate_enter(void) { return kp_gate_step_in(KP_GATED) || entered(CLOSED | ARMED); }
bool kp_gate_enter_other(void) { return kp_gate_step_in(KP_OTHER) || entered(SHUT); }
bool kp_gate_enter_capture(void) { return entered(CLOSED | ARMED | CLOSING); }

bool kp_gate_enter_refusable(uint32_t kind, bool *counted_) {
    *counted_ = kp_gate_step_in(kind) != NULL;
    return *counted_ || enter(kind == KP_GATED ? CLOSED | ARMED : SHUT, true, counted_);
}

void kp_gate_leave(bool entered) {
    if (!entered) return;
    struct kp_seat *seat = self.seat;
    if (seat == &gate.standing) rise(seat, self.standing);
    else kp_gate_step_out(seat);
}

void kp_gate_leave_nvml(void) {
    __atomic_fetch_sub(&gate.in_nvml, 1, __ATOMIC_SEQ_CST);
    if (!(GET(kp_gate_state) & TAKEN)) return;
    __atomic_fetch_add(&gate.drained, 1, __ATOMIC_SEQ_CST);
    futex_wake(&gate.drained);
}

void kp_gate_enter_nvml(void) {
    kp_check_fork();
    for (;;) {
        __atomic_fetch_add(&gate.in_nvml, 1, __ATOMIC_SEQ_CST);
        uint32_t state = GET(kp_gate_state);
        if (__builtin_expect(!(state & TAKEN), 1)) return;
        kp_gate_leave_nvml();
        if (!__atomic_exchange_n(&gate.context_asked, 1, __ATOMIC_SEQ_CST)) kp_daemon_want_context();
        futex_wait(&kp_gate_state, state, kp_now_ns() + ASK_NS);
    }
}

bool kp_gate_stand_aside(void) {
    if (self.exempt || !counted()) return false;
    rise(self.seat, KP_GATED);
    return true;
}

void kp_gate_come_back(void) { wait_to_enter(self.seat, CLOSED, false); }

void kp_gate_exempt(void) {
    self.exempt = 1;
    kp_gate_seat = NULL;
}

/* ---- the pager's side ----------------------------------------------------------------------------- */

static unsigned seated(uint32_t kind) {
    unsigned sum = 0;
    for (uint32_t i = 0, seats = GET(gate.seats); i < seats; i++) sum += GET(gate.seat[i].inside) == kind;
    return sum;
}

unsigned kp_gate_inside(void) { return GET(gate.standing.inside) + seated(KP_GATED); }
unsigned kp_gate_inside_any(void) { return kp_gate_inside() + GET(gate.standing_other) + seated(KP_OTHER); }

static bool nobody_inside(void) { return kp_gate_inside() == 0; }
static bool nobody_at_all(void) { return kp_gate_inside_any() == 0; }
static bool no_capture(void) { return GET(gate.captures) == 0; }

static bool wait_until(bool (*come)(void), int64_t until_ns) {
    for (;;) {
        uint32_t seen = GET(gate.drained);
        if (come()) return true;
        if (kp_now_ns() >= until_ns) return false;
        futex_wait(&gate.drained, seen, until_ns);
    }
}

/* Sets bits. Afterwards every thread either sees them or is seen on its seat. */
static void set(uint32_t bits) {
    if (!(__atomic_fetch_or(&kp_gate_state, bits, __ATOMIC_SEQ_CST) & SLOW))
        syscall(SYS_membarrier, MEMBARRIER_EXPEDITED, 0, 0);
}

static void clear(uint32_t bits) {
    __atomic_fetch_and(&kp_gate_state, ~bits, __ATOMIC_SEQ_CST);
    futex_wake(&kp_gate_state);
}

bool kp_gate_close(int64_t until_ns) {
    if (kp_gate_is_closed()) return true;
    set(CLOSING);
    while (wait_until(no_capture, until_ns)) {
        set(CLOSED);
        if (!wait_until(nobody_inside, until_ns)) break;
        if (no_capture()) { /* no capture began between the two waits */
            __atomic_fetch_and(&kp_gate_state, ~CLOSING, __ATOMIC_SEQ_CST);
            return true;
        }
        clear(CLOSED);
    }
    clear(CLOSED | CLOSING);
    return false;
}

bool kp_gate_shut(int64_t until_ns) {
    if (kp_gate_is_shut()) return true;
    set(SHUT);
    bool good = wait_until(nobody_at_all, until_ns);
    if (good) kp_gate_ask_again(); /* also for threads that wait since the gate was closed */
    else clear(SHUT);
    return good;
}

static bool nobody_in_nvml(void) { return GET(gate.in_nvml) == 0; }

void kp_gate_take(int64_t until_ns) {
    int64_t soon_ns = kp_now_ns() + NVML_NS;
    __atomic_store_n(&gate.context_asked, 0, __ATOMIC_SEQ_CST);
    __atomic_fetch_or(&kp_gate_state, TAKEN, __ATOMIC_SEQ_CST);
    wait_until(nobody_in_nvml, until_ns < soon_ns ? until_ns : soon_ns);
}

void kp_gate_take_back(void) {
    if (kp_gate_is_taken()) clear(TAKEN);
}

void kp_gate_open(void) {
    __atomic_store_n(&gate.asked, 0, __ATOMIC_SEQ_CST); /* if the gate is still armed, waiting threads ask again */
    clear(CLOSED | SHUT | TAKEN);
}

void kp_gate_wake(void) { futex_wake(&kp_gate_state); }

void kp_gate_ask_again(void) {
    __atomic_store_n(&gate.asked, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&gate.context_asked, 0, __ATOMIC_SEQ_CST);
    futex_wake(&kp_gate_state); /* whoever waits asks */
}

static uint64_t epoch = 1;
static bool leaky; /* a call that may write is held only while the gate is shut, or not at all */

void kp_gate_is_leaky(void) {
    __atomic_store_n(&leaky, true, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&epoch, 1, __ATOMIC_SEQ_CST);
}

uint64_t kp_gate_epoch(void) { return GET(epoch); }

bool kp_gate_is_still(uint64_t *now) {
    *now = GET(epoch);
    return kp_gate_is_armed() && no_capture() && nobody_inside() && !GET(leaky);
}

void kp_gate_arm(bool armed) {
    if (!armed) {
        __atomic_fetch_add(&epoch, 1, __ATOMIC_SEQ_CST);
        clear(ARMED);
        return;
    }
    __atomic_store_n(&gate.asked, 0, __ATOMIC_SEQ_CST);
    set(ARMED);
    futex_wake(&kp_gate_state); /* threads that wait at the closed gate must ask */
}

bool kp_gate_is_closed(void) { return GET(kp_gate_state) & CLOSED; }
bool kp_gate_is_shut(void) { return GET(kp_gate_state) & SHUT; }
bool kp_gate_is_taken(void) { return GET(kp_gate_state) & TAKEN; }
bool kp_gate_is_armed(void) { return GET(kp_gate_state) & ARMED; }

bool kp_gate_capturing(void) { return !no_capture(); }

void kp_gate_captures(int more) {
    __atomic_fetch_add(&gate.captures, more, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&gate.drained, 1, __ATOMIC_SEQ_CST);
    futex_wake(&gate.drained);
}

/* ---- start and fork --------------------------------------------------------------------------------- */

void kp_gate_prepare(void) {
    __atomic_store_n(&seats_come_back, !pthread_key_create(&leaving, give_back), __ATOMIC_SEQ_CST);
    if (syscall(SYS_membarrier, MEMBARRIER_REGISTER_EXPEDITED, 0, 0) == 0)
        __atomic_fetch_and(&kp_gate_state, ~SLOW, __ATOMIC_SEQ_CST);
}

void kp_gate_reset(void) {
    bool slow = syscall(SYS_membarrier, MEMBARRIER_REGISTER_EXPEDITED, 0, 0) != 0;
    memset(&gate, 0, sizeof gate);
    memset(&self, 0, sizeof self);
    kp_gate_seat = NULL;
    if (GET(seats_come_back)) pthread_setspecific(leaving, NULL); /* another thread may take that seat from now on */
    kp_gate_state = slow ? SLOW : 0;
}
