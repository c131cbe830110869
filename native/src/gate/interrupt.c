#define _GNU_SOURCE
#include "gate/interrupt.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gate/gate.h"

#define GET(what) __atomic_load_n(&(what), __ATOMIC_SEQ_CST)
#define SET(what, value) __atomic_store_n(&(what), value, __ATOMIC_SEQ_CST)

/* A call of another thread is refused only if the main thread, which a signal of the whole process wakes, is not back in
 * Python by then: it waits in C for that call, as in the backward pass of PyTorch. Otherwise it is a thread of the
 * user's own, which an interrupt does not end. */
#define BACK_NS 250000000ll
#define LOOK_NS 100000000ll /* a handler that runs just before the thread sleeps does not wake it */
#define ASK_NS 1000000000ll

enum { MAIN = 1, OTHERS = 2 };

static int (*later)(int (*)(void *), void *);
static uint32_t interrupts;       /* counts them */
static uint32_t handled;          /* how many there were when Python was last asked, and back */
static uint32_t refusing;         /* whose calls are refused without a wait: they belong to what was interrupted */
static bool asked;                /* Python will say when it is back */
static struct sigaction previous; /* the handler that ours stands in front of */
static struct sigaction first;    /* the first one that it stood in front of */
static __thread uint8_t depth __attribute__((tls_model("initial-exec")));

static int python_is_back(void *unused) {
    (void)unused;
    SET(asked, false);
    SET(handled, GET(interrupts));
    SET(refusing, 0);
    return 0;
}

static bool ask_python(void) {
    if (__atomic_exchange_n(&asked, true, __ATOMIC_SEQ_CST)) return true;
    bool good = GET(later) && later(python_is_back, NULL) == 0;
    if (!good) SET(asked, false);
    return good;
}

static void pass_on(const struct sigaction *to, int number, siginfo_t *info, void *context) {
    if (to->sa_flags & SA_SIGINFO) to->sa_sigaction(number, info, context);
    else to->sa_handler(number);
}

/* Passes the signal on first: Python must know of it before a call is refused. A handler that was set in front of ours, and
 * that ours then stood in front of, may call ours again. */
static void on_interrupt(int number, siginfo_t *info, void *context) {
    if (depth > 1) return;
    pass_on(depth++ ? &first : &previous, number, info, context);
    if (--depth) return;
    int before = errno;
    __atomic_fetch_add(&interrupts, 1, __ATOMIC_SEQ_CST);
    kp_gate_wake();
    errno = before;
}

static bool listening(struct sigaction *now) {
    return !sigaction(SIGINT, NULL, now) && (now->sa_flags & SA_SIGINFO) && now->sa_sigaction == on_interrupt;
}

/* Stands in front of the handler that is there. Stays until somebody else sets one, as ipykernel does after each cell: it
 * does no harm, and to take it away another's might be lost. */
static void listen(void) {
    struct sigaction now;
    if (listening(&now)) return;
    if (!(now.sa_flags & SA_SIGINFO) && (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN)) return;
    previous = now;
    if (!first.sa_handler) first = now;
    now.sa_sigaction = on_interrupt;
    now.sa_flags |= SA_SIGINFO;
    sigaction(SIGINT, &now, NULL);
}

KP_API __attribute__((used)) void kiwi_preload_interruptible(int (*how)(int (*)(void *), void *)) { SET(later, how); }

struct kp_hold kp_hold_begin(bool refusable) {
    struct kp_hold hold = {.refusable = refusable && GET(later)};
    if (!hold.refusable) return hold;
    hold.main = syscall(SYS_gettid) == getpid();
    listen();
    hold.seen = GET(interrupts);
    return hold;
}

/* Refuses what `who` calls until Python is back; if Python will not say when, only this one call. */
static bool refuse(uint32_t who) {
    __atomic_fetch_or(&refusing, who, __ATOMIC_SEQ_CST);
    if (!ask_python()) SET(refusing, 0);
    return true;
}

/* The main thread is back in Python if Python says so, or where ipykernel has set its handler after the cell. */
static bool is_back(uint32_t since) {
    struct sigaction now;
    return (int32_t)(GET(handled) - since) >= 0 || !listening(&now);
}

bool kp_hold_is_over(struct kp_hold *hold) {
    if (!hold->refusable) return false;
    if (GET(refusing) & (hold->main ? MAIN : OTHERS)) return refuse(0);
    uint32_t count = GET(interrupts);
    if (hold->main) {
        if (count != hold->seen) return refuse(MAIN);
    } else if (hold->heard_ns) {
        if (is_back(hold->heard)) {
            hold->seen = hold->heard;
            hold->heard_ns = 0;
        } else if (kp_now_ns() - hold->heard_ns >= BACK_NS) {
            return refuse(MAIN | OTHERS);
        }
    } else if (count != hold->seen && ask_python()) {
        hold->heard = count;
        hold->heard_ns = kp_now_ns();
    }
    listen(); /* another cell may have begun since */
    return false;
}

int64_t kp_hold_look_ns(const struct kp_hold *hold) { return hold->refusable ? LOOK_NS : ASK_NS; }
