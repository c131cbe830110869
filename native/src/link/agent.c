/* The native pager thread. The thread talks to the daemon, moves the memory on the daemon's orders, and is the
 * only one that closes and opens the gate. It runs no Python and takes no lock of the program: it must go on
 * when every other thread waits at the gate. */
#define _GNU_SOURCE
#include "link/agent.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/kiwi_preload.h"
#include "base/log.h"
#include "gate/gate.h"
#include "link/alone.h"
#include "link/link.h"
#include "link/pager.h"
#include "link/place.h"
#include "owner/move.h"

static const int64_t MS = 1000000, SECOND = 1000000000;
static int64_t first_word_ns = 250 * MS;          /* how long the program's start waits for the daemon */
static const int64_t WELCOME_NS = 30 * SECOND;    /* a daemon that is silent for longer hangs */
static const int64_t RETRY_MIN_NS = 200 * MS, RETRY_SOON_NS = 1 * SECOND, RETRY_NS = 3 * SECOND;
static const int64_t RETRY_SOON_FOR_NS = 60 * SECOND; /* after a lost connection: daemons are restarted */
static const int64_t ANSWER_NS = 5 * SECOND;      /* a daemon that takes longer counts as none */
static const int64_t LOOK_NS = 10 * SECOND;       /* longest sleep: the program may have closed our descriptors */
static const int64_t EXIT_NS = 5 * SECOND;        /* how long an exit waits for a move to end */

static char directory[3000], path[sizeof directory + 64];
static int64_t dialled_ns, next_try_ns, retry_ns, lost_ns;
static bool was_connected;

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static bool begun, over; /* the first try has had its result; no exit need wait for the thread any more */
static bool no_place;    /* the daemon is full: the program must not use the GPU without it meanwhile */

static void tell(bool *what) {
    pthread_mutex_lock(&mu);
    *what = true;
    pthread_cond_broadcast(&progress);
    pthread_mutex_unlock(&mu);
}

static void await(const bool *what, int64_t for_ns) {
    struct timespec limit;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += (limit.tv_nsec + for_ns) / SECOND;
    limit.tv_nsec = (limit.tv_nsec + for_ns) % SECOND;
    pthread_mutex_lock(&mu);
    while (!*what && pthread_cond_timedwait(&progress, &mu, &limit) != ETIMEDOUT) continue;
    pthread_mutex_unlock(&mu);
}

/* ---- connecting ------------------------------------------------------------------------------ */

static bool out(void) { return !strcmp(kp_pager_state(), "out") || kp_pager_yielded(); }

static void try_later(int64_t now_ns) {
    bool soon = out() || (was_connected && now_ns - lost_ns < RETRY_SOON_FOR_NS);
    int64_t most_ns = soon ? RETRY_SOON_NS : RETRY_NS;
    bool full = kp_protocol_reconnect == KP_FULL;
    if (!soon || kp_protocol_reconnect == KP_REJECTED || full || retry_ns > most_ns) retry_ns = most_ns;
    next_try_ns = kp_protocol_reconnect == KP_REPLACED ? INT64_MAX : now_ns + retry_ns;
    retry_ns *= 2;
    if (!begun && !full) {
        kp_own_decide(kp_own_asked()); /* nobody moves anything now; a daemon that comes learns what the library is */
        tell(&begun);
    }
    __atomic_store_n(&no_place, full, __ATOMIC_RELEASE);
}

static void lose(int64_t now_ns) {
    bool welcomed = kp_protocol_welcomed();
    kp_descriptor_close(&kp_wire.socket);
    kp_protocol_disconnected();
    if (welcomed) {
        kp_note("the connection to the daemon is gone");
        kp_pager_lost();
        kp_link_set_connected(false);
        was_connected = true;
        lost_ns = now_ns;
        kp_alone_begin(now_ns);
        if (now_ns - dialled_ns > RETRY_SOON_NS) retry_ns = RETRY_MIN_NS;
    }
    try_later(now_ns);
}

static void distrust(void) {
    kp_warn("the Kiwi daemon's socket %s may be another user's, and is not trusted: it and its directory must "
            "belong to you or to root, and nobody else may write there. This program runs without Kiwi. Ask "
            "who administers this machine, or set KIWI_SOCKET_DIR.",
            path);
}

static bool may_dial(void) {
    enum kp_trust trust = kp_place_trusted(directory, path + strlen(directory) + 1);
    if (trust == KP_TRUST_NO) distrust();
    return trust == KP_TRUST_YES;
}

/* Returns the result of kp_wire_open. Connecting takes long if the daemon has too many connections to accept:
 * until it is known whether the daemon is full, the program's start waits as if it were. */
static bool open_wire(void) {
    bool waits = __atomic_exchange_n(&no_place, true, __ATOMIC_ACQ_REL);
    if (!kp_wire_open(&kp_wire, path)) return false; /* try_later sets no_place */
    __atomic_store_n(&no_place, waits, __ATOMIC_RELEASE);
    return true;
}

static void crowded(void) {
    kp_protocol_reconnect = KP_FULL;
    kp_warn("this program waits for a place at the Kiwi daemon: more programs connect to %s than it accepts. "
            "Kiwi tries again by itself; see whether the daemon hangs if this lasts.",
            path);
}

static void dial(int64_t now_ns) {
    dialled_ns = now_ns;
    kp_protocol_reconnect = KP_WELCOME_AGAIN; /* an earlier daemon's answer does not count */
    if (!may_dial()) {
        try_later(now_ns);
        return;
    }
    if (open_wire()) {
        if (!kp_protocol_begin()) lose(now_ns);
        return;
    }
    if (errno == EAGAIN) crowded();
    if (errno == EPERM) distrust();
    if (errno == EACCES)
        kp_warn("you may not use the Kiwi daemon's socket %s: this program runs without Kiwi. Ask who "
                "administers this machine to add you to the group that owns it.",
                path);
    if (errno == ENAMETOOLONG)
        kp_warn("the name of the Kiwi daemon's socket is too long (%s): this program runs without Kiwi. Set "
                "KIWI_SOCKET_DIR to a directory with a short name.",
                path);
    try_later(now_ns);
}

/* ---- the thread ------------------------------------------------------------------------------ */

static int64_t alone_ns(void) { /* not while a daemon may be about to answer */
    int64_t due_ns = kp_alone_due_ns(), answer_ns = dialled_ns + ANSWER_NS;
    return kp_wire.socket.fd < 0 || due_ns > answer_ns ? due_ns : answer_ns;
}

static int patience_ms(int64_t now_ns) {
    int64_t until_ns = alone_ns();
    int64_t more_ns = kp_wire.socket.fd < 0 ? next_try_ns
                      : kp_protocol_welcomed() ? kp_protocol_due_ns()
                                           : dialled_ns + WELCOME_NS;
    if (more_ns < until_ns) until_ns = more_ns;
    if (kp_pager_due_ns() < until_ns) until_ns = kp_pager_due_ns();
    if (kp_pager_ahead_due_ns() < until_ns) until_ns = kp_pager_ahead_due_ns();
    if (until_ns > now_ns + LOOK_NS) until_ns = now_ns + LOOK_NS;
    return until_ns <= now_ns ? 0 : (int)((until_ns - now_ns) / MS) + 1;
}

static void wait_for_something(void) {
    struct pollfd polled[] = {
        {.fd = kp_link_wake_fd(), .events = POLLIN},
        {.fd = kp_wire.socket.fd, .events = (short)(POLLIN | (kp_wire.unsent ? POLLOUT : 0))}};
    if (poll(polled, 2, patience_ms(kp_now_ns())) <= 0) {
        kp_link_clear_wake(); /* renews the wake-up descriptor if the program has closed it */
        return;
    }
    if (polled[0].revents) kp_link_clear_wake();
    if (kp_wire.socket.fd < 0 || !polled[1].revents) return;
    if (!kp_wire_receive(&kp_wire, kp_protocol_receive)) lose(kp_now_ns());
    else if (kp_protocol_caught_up() && !begun) {
        __atomic_store_n(&no_place, false, __ATOMIC_RELEASE);
        tell(&begun);
    }
}

/* Drops a connection whose daemon reads nothing more. If it never welcomed us, its last message says why. Otherwise
 * what is unread stays so. It may be an order, which must not begin now: nobody would hear its outcome, and after a
 * hold nobody would say "free". The next daemon learns from our state that nothing was done. */
static void cut_off(int64_t now_ns) {
    if (!kp_protocol_welcomed()) kp_wire_receive(&kp_wire, kp_protocol_receive);
    lose(now_ns);
}

static bool something_came(void) {
    struct pollfd polled[] = {{.fd = kp_link_wake_fd(), .events = POLLIN}, {.fd = kp_wire.socket.fd, .events = POLLIN}};
    return poll(polled, 2, 0) != 0;
}

static void once(void) {
    int64_t now_ns = kp_now_ns();
    if (kp_wire.socket.fd < 0 && now_ns >= next_try_ns) dial(now_ns);
    if (kp_wire.socket.fd >= 0 && !kp_protocol_welcomed() && now_ns > dialled_ns + WELCOME_NS) lose(now_ns);
    if (kp_wire.socket.fd >= 0 && (!kp_protocol_send_due(now_ns) || !kp_wire_flush(&kp_wire))) cut_off(now_ns);
    kp_pager_look(now_ns);
    if (kp_pager_ahead_due_ns() <= now_ns) kp_pager_ahead(something_came);
    if (kp_alone_due_ns() <= now_ns && alone_ns() <= now_ns) kp_alone(now_ns);
    wait_for_something();
}

static void *run(void *unused) {
    (void)unused;
    kp_gate_exempt();
    pthread_setname_np(pthread_self(), "kiwi-pager");
    while (!kp_link_ended() || kp_pager_away()) {
        if (kp_link_ended()) tell(&over);
        once();
    }
    kp_pager_leave();
    kp_wire_flush(&kp_wire); /* the outcome of the last order */
    kp_descriptor_close(&kp_wire.socket);
    tell(&over);
    return NULL;
}

/* ---- beginning and ending -------------------------------------------------------------------- */

static bool forked;

/* Closes the child's copy: the parent's connection ends only when its last copy is closed. */
static void in_child(void) {
    forked = true;
    kp_link_forked();
    kp_descriptor_close(&kp_wire.socket);
}

/* Ends the link before the driver shuts down: no move may be under way then. Where the memory is out, or the driver
 * may have the process, the gate stays shut, and the thread goes on: calls by later exit handlers, which were registered
 * before the program used the GPU, wait until everything is back. A program that makes no more calls ends at once. */
static void at_exit(void) {
    kp_check_fork();
    if (forked) return;
    kp_link_end();
    if (!kp_pager_away()) await(&over, EXIT_NS);
}

/* Waits without limit for a place at the daemon: a program that goes on would use the GPU beside programs
 * that wait for their turn. */
static void await_place(void) {
    while (__atomic_load_n(&no_place, __ATOMIC_ACQUIRE) && !kp_link_ended()) await(&begun, SECOND);
}

void kp_link_start(const CUuuid *gpu) {
    static bool started;
    char uuid[41];
    if (__atomic_exchange_n(&started, true, __ATOMIC_ACQ_REL)) return;
    kp_place_uuid((const unsigned char *)gpu->bytes, uuid);
    if (!kp_place_directory(directory, sizeof directory)) {
        kp_warn("the name of the directory of Kiwi's sockets is too long: this program runs without Kiwi. "
                "Set KIWI_SOCKET_DIR to a directory with a short name.");
        tell(&begun);
        return;
    }
    snprintf(path, sizeof path, "%s/%s.sock", directory, uuid);
    kp_alone_prepare();
    kp_alone_read_setting("KIWI_PRELOAD_FIRST_MS", MS, &first_word_ns);
    kp_at_fork(in_child);
    /* The helper that settles the GPU is started now: at a page-out there may be no thread to be had. */
    if (!kp_link_prepare() || atexit(at_exit) || !kp_move_prepare() || !kp_start_thread(run)) {
        kp_link_forked();
        kp_warn("the system has no thread or descriptor to spare for Kiwi: this program runs without it.");
        tell(&begun);
    }
}

void kp_link_await(void) {
    await(&begun, first_word_ns);
    await_place();
    kp_own_decide(false);
}
