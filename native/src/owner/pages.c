/* Faults in the pages of new host memory on the switch path: by several threads, and ahead of the copies.
 *
 * The system clears a page when it is first touched. A driver that copies into new memory touches it with one thread
 * and does not copy meanwhile, which takes longer than the copies. Here helpers work through a range of new memory from
 * its beginning. The pager thread takes memory in the same order, works along until its own part is there, and copies
 * into that while the helpers go on. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <sys/mman.h>

#include "base/kiwi_preload.h"
#include "base/tested.h"
#include "owner/pieces.h"

#define PAGE 4096u
#define MADV_POPULATE_WRITE_ 23 /* of Linux 5.14, which old systems' headers lack */
#define STRIPE_BYTES (2 * KP_ARENA_UNIT) /* takes a millisecond or a few: who ends a range does not wait longer */
enum { HELPERS = 3, WORKERS }; /* worker 0 is the pager thread */

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; /* guards all of this; no page is faulted in under it */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char *from, *to;           /* the range; NULL: there is none */
static char *next, *end;          /* what of it nobody has begun with */
static char *working_at[WORKERS]; /* NULL: this worker has no stripe */
static int helpers, joined;       /* threads that have not ended, and those of them that have begun */
static bool failed;               /* the system has no memory for a page of the range */

bool kp_pages_fault_in(char *at, size_t bytes) {
    if (kp_fault(KP_FAULT_PAGES)) return false;
    if (!madvise(at, bytes, MADV_POPULATE_WRITE_)) return true;
    if (errno != EINVAL && errno != ENOSYS && errno != EPERM) return false; /* a touch would end the program */
    for (size_t i = 0; i < bytes; i += PAGE) ((volatile char *)at)[i] = 0;
    return true;
}

static int spare_processors(void) {
    cpu_set_t set;
    int spare = sched_getaffinity(0, sizeof set, &set) ? 0 : CPU_COUNT(&set) - 1;
    return spare < HELPERS ? spare : HELPERS;
}

/* Returns the address below which everything is there. mu held. */
static char *there(void) {
    char *at = next;
    for (int i = 0; i < WORKERS; i++) {
        if (working_at[i] && working_at[i] < at) at = working_at[i];
    }
    return at;
}

static void work(int worker) { /* on one stripe; mu held, released meanwhile */
    char *at = next;
    size_t left = (size_t)(end - at), bytes = left < STRIPE_BYTES ? left : STRIPE_BYTES;
    next = at + bytes;
    working_at[worker] = at;
    pthread_mutex_unlock(&mu);
    bool good = kp_pages_fault_in(at, bytes);
    pthread_mutex_lock(&mu);
    working_at[worker] = NULL;
    if (!good) {
        failed = true;
        end = next;
    }
    pthread_cond_broadcast(&changed);
}

static void *help(void *arg) {
    (void)arg;
    pthread_mutex_lock(&mu);
    int worker = ++joined;
    while (next < end) work(worker);
    helpers--;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mu);
    return NULL;
}

static void finish(void) { /* mu held, released meanwhile */
    while (next < end) work(0);
    while (helpers) pthread_cond_wait(&changed, &mu);
}

static void begin(char *at, size_t bytes) { /* mu held, released meanwhile */
    int wanted = (int)((bytes - 1) / STRIPE_BYTES), spare = spare_processors();
    finish(); /* all of the range before this one is wanted, too */
    from = next = at;
    to = end = at + bytes;
    joined = 0;
    failed = false;
    if (spare < wanted) wanted = spare;
    while (helpers < wanted && kp_start_thread(help)) helpers++;
}

bool kp_pages_need(char *at, size_t bytes, size_t ahead) {
    pthread_mutex_lock(&mu);
    if (at < from || at + bytes > to) begin(at, ahead);
    while (!failed && there() < at + bytes) {
        if (next < end) work(0);
        else pthread_cond_wait(&changed, &mu);
    }
    bool good = !failed;
    pthread_mutex_unlock(&mu);
    return good;
}

void kp_pages_end(void) {
    pthread_mutex_lock(&mu);
    end = next;
    finish();
    from = to = NULL;
    pthread_mutex_unlock(&mu);
}
