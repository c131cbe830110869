/* Requests of the program's threads to the daemon. A thread only records its request and wakes the pager thread
 * (agent.c), which sends the request and brings the answer. */
#define _GNU_SOURCE
#include "link/link.h"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/kiwi_preload.h"
#include "gate/gate.h"
#include "link/agent.h"
#include "owner/arena.h"

static const int64_t WITHOUT_DAEMON_NS = 30 * (int64_t)1000000000; /* the daemon may be restarted meanwhile */

struct room_request { /* on the stack of the thread that waits */
    struct room_request *next;
    uint64_t request, bytes;
    bool asked, answered, granted;
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static pthread_cond_t changed;                         /* on CLOCK_MONOTONIC */
static struct room_request *room_requests;
static uint64_t last_request;
static bool connected, ended;
static int64_t away_since_ns = INT64_MIN / 2; /* when the daemon was lost; long ago: there never was one */

static struct kp_descriptor bell[2] = {{.fd = -1}, {.fd = -1}}; /* wakes the pager thread: what is sent to 1 arrives at 0 */
static bool lease_wanted, books_changed, usable; /* atomics */

static bool take(bool *flag) {
    return __atomic_load_n(flag, __ATOMIC_RELAXED) && __atomic_exchange_n(flag, false, __ATOMIC_ACQ_REL);
}

static void raise_flag(bool *flag) {
    if (!__atomic_exchange_n(flag, true, __ATOMIC_ACQ_REL)) kp_link_wake();
}

/* ---- the threads that want something --------------------------------------------------------- */

void kp_link_want_lease(void) {
    if (__atomic_load_n(&usable, __ATOMIC_ACQUIRE)) raise_flag(&lease_wanted);
}

void kp_link_books_changed(void) {
    if (__atomic_load_n(&books_changed, __ATOMIC_RELAXED)) return;
    if (__atomic_load_n(&usable, __ATOMIC_ACQUIRE)) raise_flag(&books_changed);
}

static void forget(struct room_request *asker) {
    struct room_request **at = &room_requests;
    while (*at != asker) at = &(*at)->next;
    *at = asker->next;
}

static bool await(struct room_request *asker, int64_t until_ns) {
    while (!asker->answered && !ended) {
        int64_t alone_ns = away_since_ns + WITHOUT_DAEMON_NS;
        int64_t limit_ns = connected || until_ns < alone_ns ? until_ns : alone_ns;
        if (kp_now_ns() >= limit_ns) break;
        struct timespec limit = {limit_ns / 1000000000, limit_ns % 1000000000};
        pthread_cond_timedwait(&changed, &mu, &limit);
    }
    return asker->granted;
}

bool kp_link_want_room(uint64_t bytes, int64_t until_ns) {
    struct room_request asker = {.bytes = bytes};
    if (!__atomic_load_n(&usable, __ATOMIC_ACQUIRE)) return false;
    kp_gate_stand_aside(true);
    pthread_mutex_lock(&mu);
    asker.request = ++last_request;
    asker.next = room_requests;
    room_requests = &asker;
    kp_link_wake();
    bool granted = await(&asker, until_ns);
    forget(&asker);
    pthread_mutex_unlock(&mu);
    kp_gate_stand_aside(false);
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
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    bool good = !pthread_cond_init(&changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    good = good && hang_bell();
    __atomic_store_n(&usable, good, __ATOMIC_RELEASE);
    return good;
}

void kp_link_forked(void) {
    __atomic_store_n(&usable, false, __ATOMIC_RELEASE);
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
bool kp_link_take_books(void) { return take(&books_changed); }

bool kp_link_take_room(uint64_t *request, uint64_t *bytes) {
    struct room_request *oldest = NULL; /* the list has the youngest first */
    pthread_mutex_lock(&mu);
    for (struct room_request *asker = room_requests; asker; asker = asker->next)
        if (!asker->asked) oldest = asker;
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
    for (struct room_request *asker = room_requests; asker; asker = asker->next) wanted = wanted || !asker->answered;
    pthread_mutex_unlock(&mu);
    return wanted;
}

void kp_link_answer_room(uint64_t request, bool granted) {
    pthread_mutex_lock(&mu);
    for (struct room_request *asker = room_requests; asker; asker = asker->next) {
        if (asker->request != request || !asker->asked) continue;
        asker->answered = true;
        asker->granted = granted;
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mu);
}

void kp_link_set_connected(bool now) {
    pthread_mutex_lock(&mu);
    if (connected && !now) away_since_ns = kp_now_ns();
    connected = now;
    for (struct room_request *asker = room_requests; asker; asker = asker->next) asker->asked = false;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mu);
    take(&lease_wanted); /* a thread that wanted the lease was let through, or asks again */
    kp_arena_enable(now); /* without a daemon that could page us out, no host memory is pinned */
}

void kp_link_end(void) {
    pthread_mutex_lock(&mu);
    ended = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mu);
    kp_link_wake();
}

bool kp_link_ended(void) {
    pthread_mutex_lock(&mu);
    bool answer = ended;
    pthread_mutex_unlock(&mu);
    return answer;
}
