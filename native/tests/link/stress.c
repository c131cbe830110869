/* Runs the link's threads under the sanitizers, with the real gate and a simulated mover: several threads use the
 * link while a daemon (test_stress.py) sends orders, cuts the connection and sends nonsense.
 *
 * stress ROUNDS. Ends once its input has ended and its threads have made so many rounds: by exit(), while they still run.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/daemon.h"
#include "base/kiwi_preload.h"
#include "gate/gate.h"
#include "link/link.h"
#include "owner/arena.h"
#include "owner/move.h"
#include "owner/own.h"

#define MUST(condition)                                                                              \
    do {                                                                                             \
        if (!(condition)) fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition), abort(); \
    } while (0)

enum { THREADS = 4 };
static int out, moving, leaving; /* atomics */
static unsigned long rounds;

static void nap(long us) {
    struct timespec t = {0, us * 1000};
    nanosleep(&t, NULL);
}

/* ---- instead of the driver ---- */

static void move(struct kp_outcome *o, bool was_out, bool is_out) {
    MUST(kp_gate_is_closed());
    MUST(__atomic_load_n(&out, __ATOMIC_SEQ_CST) == was_out);
    MUST(!__atomic_exchange_n(&moving, 1, __ATOMIC_SEQ_CST));
    nap(300);
    *o = (struct kp_outcome){.what = kp_now_ns() % 5 ? KP_MOVED : KP_REFUSED, .reason = "no-room"};
    if (o->what == KP_MOVED) __atomic_store_n(&out, is_out, __ATOMIC_SEQ_CST);
    __atomic_store_n(&moving, 0, __ATOMIC_SEQ_CST);
}
bool kp_move_prepare(void) { return true; }
void kp_move_settle(int64_t until_ns, struct kp_outcome *o) { (void)until_ns, move(o, false, false); }
bool kp_owning(void) { return true; }
bool kp_own_decided(void) { return true; }
bool kp_own_asked(void) { return true; }
bool kp_own_decide(bool own) { return own; }
void kp_move_out(int64_t until_ns, struct kp_outcome *o) {
    (void)until_ns;
    MUST(kp_gate_is_shut());
    move(o, false, true);
}
void kp_move_in(int64_t until_ns, struct kp_outcome *o) { (void)until_ns, move(o, true, false); }
bool kp_move_clean(uint64_t most, int64_t until_ns, struct kp_outcome *o) {
    (void)most, (void)until_ns, (void)o;
    return false;
}
bool kp_move_all_in(void) { return !__atomic_load_n(&out, __ATOMIC_SEQ_CST); }
void kp_arena_enable(bool on) { (void)on; }
void kp_arena_allow(uint64_t bytes) { (void)bytes; }
void kp_arena_await_limit(void) {}
bool kp_move_ahead(bool (*stop)(void)) { return !stop(); }
void kp_move_forget_ahead(void) {}
void kp_arena_books(struct kp_arena_books *books) { memset(books, 0, sizeof *books); }
bool kp_arena_stop(bool on, int64_t until_ns) { return !on || until_ns > 0; }
void kp_move_forget(uint64_t most_bytes) { (void)most_bytes; }
void kp_own_books(struct kp_books *books) { memset(books, 0, sizeof *books); }
void kp_need_take(struct kp_need *need) { memset(need, 0, sizeof *need); }
uint64_t kp_own_ipc_refused(void) { return 0; }
const char *kp_foreign_name(enum kp_foreign kind) { return kind ? "array" : "pool"; }

/* ---- the program ---- */

/* Returns whether the memory is in the GPU and is not being moved, as a thread that has passed the gate must find it. At
 * exit every thread passes. */
static bool settled(void) {
    bool now = !__atomic_load_n(&out, __ATOMIC_SEQ_CST) && !__atomic_load_n(&moving, __ATOMIC_SEQ_CST);
    return now || __atomic_load_n(&leaving, __ATOMIC_SEQ_CST);
}

static void *work(void *seed_) {
    unsigned seed = (unsigned)(size_t)seed_;
    for (;;) {
        bool entered = kp_gate_enter();
        MUST(settled());
        __atomic_fetch_add(&rounds, 1, __ATOMIC_RELAXED);
        if (rand_r(&seed) % 8 == 0) {
            kp_daemon_want_room((uint64_t)rand_r(&seed), kp_now_ns() + rand_r(&seed) % 20000000);
            MUST(settled());
        }
        kp_daemon_books_changed();
        kp_gate_leave(entered);
        entered = kp_gate_enter_other(); /* may pass while the gate is closed, but not while it is shut */
        MUST(!__atomic_load_n(&out, __ATOMIC_SEQ_CST) || __atomic_load_n(&leaving, __ATOMIC_SEQ_CST));
        kp_gate_leave(entered);
        if (rand_r(&seed) % 4 == 0) nap(rand_r(&seed) % 200);
    }
    return NULL;
}

int main(int argc, char **argv) {
    CUuuid gpu = {{0}};
    pthread_t thread;
    MUST(argc == 2);
    for (size_t i = 1; i <= THREADS; i++) {
        if (i == THREADS / 2) kp_link_start(&gpu); /* others use the gate, and ask for room, before there is a link */
        MUST(!pthread_create(&thread, NULL, work, (void *)i));
    }
    while (getchar() != EOF) continue;
    while (__atomic_load_n(&rounds, __ATOMIC_RELAXED) < strtoul(argv[1], NULL, 10)) nap(1000);
    printf("%lu\n", __atomic_load_n(&rounds, __ATOMIC_RELAXED));
    fflush(stdout);
    __atomic_store_n(&leaving, 1, __ATOMIC_SEQ_CST);
    exit(0);
}
