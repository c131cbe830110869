/* Requests of the program's threads to the daemon. A thread only records its request and wakes the pager thread
 * (agent.c), which sends the request and brings the answer. */
#define _GNU_SOURCE
#include "link/link.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/daemon.h"
#include "base/kiwi_preload.h"
#include "gate/gate.h"
#include "link/agent.h"
#include "owner/arena.h"

static const int64_t WITHOUT_DAEMON_NS = 30 * (int64_t)1000000000; /* the daemon may be restarted meanwhile */

/* A signal handler may leave the wait for room by siglongjmp(). So the waiting thread holds no lock and nobody points
 * into its stack: it knows its request by number, and renews it each second. What is not renewed is dropped. */
static const int64_t RENEW_NS = 1 * (int64_t)1000000000, LEFT_NS = 5 * (int64_t)1000000000;

struct room_request {
    struct room_request *next;
    uint64_t request, bytes;
    int64_t renewed_ns;
    bool asked, answered, granted;
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; /* guards what follows; see take_mu() */
static uint32_t changes;                               /* a futex: grows when a waiting thread should look again */
static struct room_request *room_requests;
static uint64_t last_request;
static bool connected, ended;
static int64_t away_since_ns = INT64_MIN / 2; /* when the daemon was lost; long ago: there never was one */

static struct kp_descriptor bell[2] = {{.fd = -1}, {.fd = -1}}; /* wakes the pager thread: what is sent to 1 arrives at 0 */
static bool lease_wanted, lease_unwanted, context_wanted, books_changed; /* atomics */

static bool take(bool *flag) {
    return __atomic_load_n(flag, __ATOMIC_RELAXED) && __atomic_exchange_n(flag, false, __ATOMIC_ACQ_REL);
}

static void raise_flag(bool *flag) {
    if (!__atomic_exchange_n(flag, true, __ATOMIC_ACQ_REL)) kp_link_wake();
}

/* ---- the threads that want something --------------------------------------------------------- */

static void want_lease(bool wanted) {
    if (!wanted) take(&lease_wanted); /* first: whoever else waits raises it again */
    raise_flag(wanted ? &lease_wanted : &lease_unwanted);
}

static void want_context(void) { raise_flag(&context_wanted); }

static void note_books(void) {
    if (!__atomic_load_n(&books_changed, __ATOMIC_RELAXED)) raise_flag(&books_changed);
}

/* No signal handler leaves a thread that holds the mutex. */
static void take_mu(sigset_t *before) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, before);
    pthread_mutex_lock(&mu);
}

static void give_mu(const sigset_t *before) {
    pthread_mutex_unlock(&mu);
    pthread_sigmask(SIG_SETMASK, before, NULL);
}

static void call_all(void) { /* mu held: lets all that wait for room look again */
    __atomic_fetch_add(&changes, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &changes, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, INT_MAX, NULL, NULL, 0);
}

static void drop_left(int64_t now_ns) { /* mu held */
    for (struct room_request **at = &room_requests, *r; (r = *at);) {
        if (now_ns - r->renewed_ns < LEFT_NS) {
            at = &r->next;
            continue;
        }
        *at = r->next;
        free(r);
    }
}

/* Returns where the request is, or a new one; mu held. NULL: no memory. */
static struct room_request **find_or_ask(uint64_t *number, uint64_t bytes) {
    struct room_request **at = &room_requests, *new;
    while (*at && (*at)->request != *number) at = &(*at)->next;
    if (*at) return at;
    if (!(new = malloc(sizeof *new))) return NULL;
    *number = ++last_request;
    *new = (struct room_request){.next = room_requests, .request = *number, .bytes = bytes};
    room_requests = new;
    kp_link_wake();
    return &room_requests;
}

/* Returns whether the wait for room is over; else renews the request. `*seen` is for the futex. */
static bool look(uint64_t *number, uint64_t bytes, int64_t until_ns, bool *granted, uint32_t *seen) {
    sigset_t before;
    take_mu(&before);
    struct room_request **at = find_or_ask(number, bytes), *r = at ? *at : NULL;
    int64_t now_ns = kp_now_ns(), alone_ns = away_since_ns + WITHOUT_DAEMON_NS;
    bool over = !r || r->answered || ended || now_ns >= until_ns || (!connected && now_ns >= alone_ns);
    if (r) r->renewed_ns = now_ns, *granted = r->granted;
    if (r && over) *at = r->next, free(r);
    *seen = changes;
    give_mu(&before);
    return over;
}

static bool want_room(uint64_t bytes, int64_t until_ns) {
    uint64_t number = 0; /* of no request */
    uint32_t seen;
    bool granted = false;
    bool aside = kp_gate_stand_aside();
    while (!look(&number, bytes, until_ns, &granted, &seen)) {
        int64_t next_ns = kp_now_ns() + RENEW_NS;
        struct timespec next = {next_ns / 1000000000, next_ns % 1000000000};
        syscall(SYS_futex, &changes, FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG, seen, &next, NULL, FUTEX_BITSET_MATCH_ANY);
    }
    if (aside) kp_gate_come_back();
    return granted;
}

/* ---- the pager thread ------------------------------------------------------------------------ */

static bool hang_bell(void) {
    int ends[2];
    for (int i = 0; i < 2; i++) kp_descriptor_close(&bell[i]);
    /* Not a pipe: a write would end the program by a signal where it has closed the other end. */
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends)) return false;
    for (int i = 0; i < 2; i++) bell[i] = kp_descriptor(ends[i]);
    return true;
}

bool kp_link_prepare(void) {
    static const struct kp_daemon link = {want_lease, want_context, want_room, note_books};
    if (!hang_bell()) return false;
    kp_daemon_through(&link);
    return true;
}

void kp_link_forked(void) {
    kp_daemon_through(NULL);
    for (int i = 0; i < 2; i++) kp_descriptor_close(&bell[i]);
}

int kp_link_wake_fd(void) { return bell[0].fd; }

void kp_link_wake(void) {
    if (!kp_descriptor_is_ours(&bell[1])) return;
    if (send(bell[1].fd, "", 1, MSG_NOSIGNAL) < 0) return; /* full: the thread is awake */
}

void kp_link_clear_wake(void) {
    char rings[64]; /* if there are more, the next poll returns at once */
    if (!kp_descriptor_is_ours(&bell[0]) || !kp_descriptor_is_ours(&bell[1])) hang_bell();
    else if (read(bell[0].fd, rings, sizeof rings) < 0) return; /* nobody had woken us */
}

bool kp_link_take_lease(void) { return take(&lease_wanted); }
bool kp_link_take_no_lease(void) { return take(&lease_unwanted); }
bool kp_link_take_context(void) { return take(&context_wanted); }
bool kp_link_take_books(void) { return take(&books_changed); }

bool kp_link_take_room(uint64_t *request, uint64_t *bytes) {
    struct room_request *oldest = NULL; /* the list has the youngest first */
    pthread_mutex_lock(&mu);
    drop_left(kp_now_ns());
    for (struct room_request *r = room_requests; r; r = r->next)
        if (!r->asked) oldest = r;
    if (oldest) {
        oldest->asked = true;
        *request = oldest->request;
        *bytes = oldest->bytes;
    }
    pthread_mutex_unlock(&mu);
    return oldest != NULL;
}

bool kp_link_room_wanted(void) {
    bool wanted = false;
    pthread_mutex_lock(&mu);
    drop_left(kp_now_ns());
    for (struct room_request *r = room_requests; r; r = r->next) wanted = wanted || !r->answered;
    pthread_mutex_unlock(&mu);
    return wanted;
}

void kp_link_answer_room(uint64_t request, bool granted) {
    pthread_mutex_lock(&mu);
    for (struct room_request *r = room_requests; r; r = r->next) {
        if (r->request != request || !r->asked) continue;
        r->answered = true;
        r->granted = granted;
    }
    call_all();
    pthread_mutex_unlock(&mu);
}

void kp_link_set_connected(bool now) {
    pthread_mutex_lock(&mu);
    if (connected && !now) away_since_ns = kp_now_ns();
    connected = now;
    for (struct room_request *r = room_requests; r; r = r->next) r->asked = false;
    call_all();
    pthread_mutex_unlock(&mu);
    take(&context_wanted);
    take(&lease_wanted); /* a thread that wanted the lease was let through, or asks again */
    kp_arena_enable(now); /* without a daemon that could page us out, no host memory is pinned */
}

void kp_link_end(void) {
    pthread_mutex_lock(&mu);
    ended = true;
    call_all();
    pthread_mutex_unlock(&mu);
    kp_link_wake();
}

bool kp_link_ended(void) {
    pthread_mutex_lock(&mu);
    bool answer = ended;
    pthread_mutex_unlock(&mu);
    return answer;
}
