/* What to do without a daemon. A daemon that ends pages everything in; one that is killed is started again
 * within seconds. If neither happens, a program whose memory is out would wait for ever. So after a while it
 * tries to page in by itself. Several programs may try: one that finds room in the GPU runs, without Kiwi,
 * and the others go on trying. A page-in takes all that it needs or nothing. A daemon that starts meanwhile
 * decides nothing about memory that it cannot see: it asks the driver what is used, and learns the state from
 * the first `pager-state`. */
#include "link/alone.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/kiwi_preload.h"
#include "base/log.h"
#include "link/pager.h"
#include "owner/arena.h"

#define SECOND_NS ((int64_t)1000000000)
static const int64_t COMPLAIN_NS = 10 * SECOND_NS;  /* before a warning: daemons are restarted faster */
static const int64_t GIVE_UP_NS = 60 * SECOND_NS;   /* until host memory that is only for speed is freed */
static const int64_t WITHIN_NS = 600 * SECOND_NS;   /* a page-in of the largest GPU, from pageable memory */
static const int64_t PAUSE_MIN_NS = 1 * SECOND_NS, PAUSE_MAX_NS = 30 * SECOND_NS;

static int64_t silence_ns = 30 * SECOND_NS, come_back_ns = 30 * SECOND_NS; /* defaults */
static bool alone, warned, given_up;
static int64_t since_ns, next_try_ns, pause_ns;

void kp_alone_read_setting(const char *name, int64_t unit_ns, int64_t *ns) {
    const char *word = getenv(name);
    char *end = NULL;
    long units = word && *word ? strtol(word, &end, 10) : 0;
    if (end && !*end && units > 0 && units <= 86400) *ns = units * unit_ns;
}

void kp_alone_prepare(void) {
    kp_alone_read_setting("KIWI_PRELOAD_SILENCE_S", SECOND_NS, &silence_ns);
    kp_alone_read_setting("KIWI_PRELOAD_ALONE_S", SECOND_NS, &come_back_ns);
}

int64_t kp_alone_silence_ns(void) { return silence_ns; }

static bool waits(void) { return !strcmp(kp_pager_state(), "out") || kp_pager_yielded(); }
static bool may_come_back(void) { return waits() && !kp_pager_yielded(); }

void kp_alone_begin(int64_t now_ns) {
    alone = true;
    warned = given_up = false;
    since_ns = now_ns;
    next_try_ns = now_ns + come_back_ns;
    pause_ns = PAUSE_MIN_NS;
}

void kp_alone_end(void) {
    if (given_up) kp_arena_allow(UINT64_MAX);
    alone = given_up = false;
}

int64_t kp_alone_due_ns(void) {
    int64_t due_ns = INT64_MAX;
    if (!alone) return due_ns;
    if (!given_up) due_ns = since_ns + GIVE_UP_NS;
    if (waits() && !warned && since_ns + COMPLAIN_NS < due_ns) due_ns = since_ns + COMPLAIN_NS;
    if (may_come_back() && next_try_ns < due_ns) due_ns = next_try_ns;
    return due_ns;
}

/* Lengthens a pause by an amount of this process, so that programs which lost the same daemon do not all try at
 * the same time. */
static int64_t scattered_ns(int64_t ns) { return ns + ns / 100 * (getpid() % 50); }

static void come_back(void) {
    struct kp_message order = {.action = KP_DO_PAGE_IN, .within_ns = WITHIN_NS};
    struct kp_outcome outcome;
    struct kp_done done;
    kp_pager_do(&order, &outcome, &done);
    kp_note("without a daemon: page-in %s %s %s", done.outcome, done.reason, done.detail);
    next_try_ns = kp_now_ns() + scattered_ns(pause_ns);
    pause_ns = pause_ns * 2 < PAUSE_MAX_NS ? pause_ns * 2 : PAUSE_MAX_NS;
    switch (outcome.what) {
    case KP_MOVED:
        kp_warn("no Kiwi daemon has come back: this program's GPU memory was brought back without one. It "
                "runs without Kiwi until there is a daemon again.");
        break;
    case KP_LOST: kp_warn("the contents of this program's GPU memory are lost (%s). Start it again.", done.detail); break;
    case KP_REFUSED:
        kp_warn("no Kiwi daemon has come back, and this program's GPU memory cannot be brought back without "
                "one yet (%s). It goes on trying.", done.detail);
    }
}

void kp_alone(int64_t now_ns) {
    if (!alone) return;
    if (!given_up && now_ns >= since_ns + GIVE_UP_NS) {
        given_up = true;
        kp_arena_allow(0);
    }
    if (!waits()) return;
    if (!warned && now_ns >= since_ns + COMPLAIN_NS && kp_pager_yielded()) {
        warned = true;
        kp_warn("the Kiwi daemon is gone while the driver may have this program's GPU memory in system RAM. It "
                "goes on as soon as a daemon is back: start one with `kiwi daemon`. Until then its calls to the "
                "GPU wait.");
    }
    if (!may_come_back()) return;
    if (!warned && now_ns >= since_ns + COMPLAIN_NS && now_ns < next_try_ns) {
        warned = true;
        kp_warn("the Kiwi daemon is gone while this program's GPU memory is in system RAM. It goes on as "
                "soon as a daemon is back: start one with `kiwi daemon`. Without one it tries to bring its "
                "memory back by itself before long.");
    }
    if (now_ns >= next_try_ns) come_back();
}
