/* Waits until the GPU has done all the work that the process gave it.
 *
 * A host function that waits for the GIL can keep a context busy for as long as the program's thread waits at
 * the gate. So a helper thread synchronises, and the pager waits for the helper with a time limit. A helper
 * that is stuck is asked again, never replaced. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/kiwi_preload.h"
#include "base/real.h"
#include "gate/gate.h"
#include "owner/blocks.h"
#include "owner/move.h"

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed; /* on CLOCK_MONOTONIC */
static bool started;
static uint64_t asked, done; /* number of the latest run requested, and of the latest run that ended */
static CUresult result;

/* Synchronises a context. In a process that the driver has checkpointed a synchronise call crashes, while
 * recording an event waits until the process is restored. No caller should ask for this in such a process; if
 * one does, the request times out. */
static CUresult synchronise(struct kp_ctx *c) {
    CUevent event;
    CUresult rc = kp_ctx_push(c);
    if (rc != CUDA_SUCCESS) return rc;
    rc = kp_real.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (rc == CUDA_SUCCESS) {
        kp_real.cuEventRecord(event, CU_STREAM_LEGACY); /* the next call returns a context's error */
        kp_real.cuEventDestroy_v2(event);
    }
    rc = kp_real.cuCtxSynchronize();
    kp_ctx_pop(c);
    return rc;
}

/* By NVIDIA's documentation these errors mean that the process must be terminated (719 and the like), or that the
 * context cannot be used any more (710). The neighbouring numbers (709, 711 to 713, 720) concern one call only. */
bool kp_move_sticky(CUresult rc) {
    int n = (int)rc;
    return n == 700 || n == 702 || n == 710 || (n >= 714 && n <= 719);
}

static CUresult synchronise_all(void) {
    struct kp_ctx **list;
    CUresult rc = CUDA_SUCCESS;
    size_t n = kp_ctx_hold_all(&list, false);
    for (size_t i = 0; i < n; i++) {
        CUresult one = synchronise(list[i]);
        if (rc == CUDA_SUCCESS && !kp_move_sticky(one)) rc = one;
        kp_ctx_let_go(list[i]);
    }
    free(list);
    return rc;
}

static void *helper(void *arg) {
    (void)arg;
    kp_gate_exempt();
    pthread_mutex_lock(&mu);
    for (;;) {
        while (done == asked) pthread_cond_wait(&changed, &mu);
        uint64_t run = asked;
        pthread_mutex_unlock(&mu);
        CUresult rc = synchronise_all();
        pthread_mutex_lock(&mu);
        result = rc;
        done = run;
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

static void prepare(void) {
    pthread_condattr_t a;
    pthread_condattr_init(&a);
    pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &a);
    pthread_condattr_destroy(&a);
}

static bool start(void) { /* mu held */
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare);
    return started = started || kp_start_thread(helper);
}

bool kp_move_prepare(void) {
    pthread_mutex_lock(&mu);
    bool good = start();
    pthread_mutex_unlock(&mu);
    return good;
}

void kp_move_settle(int64_t until_ns, struct kp_outcome *o) {
    int64_t began_ns = kp_now_ns();
    struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
    *o = (struct kp_outcome){.what = KP_MOVED, .reason = ""};
    pthread_mutex_lock(&mu);
    bool ok = start();
    uint64_t mine = ++asked;
    if (ok) pthread_cond_broadcast(&changed);
    while (ok && done < mine && pthread_cond_timedwait(&changed, &mu, &until) != ETIMEDOUT) {}
    bool ended = ok && done >= mine;
    CUresult rc = result;
    pthread_mutex_unlock(&mu);
    o->elapsed_ns = kp_now_ns() - began_ns;
    if (ended && rc == CUDA_SUCCESS) return;
    o->what = KP_REFUSED;
    o->reason = ended || !ok ? "driver" : "lock-timeout";
    const char *words = NULL;
    if (ended) kp_real.cuGetErrorString(rc, &words);
    snprintf(o->detail, sizeof o->detail, "%s%s",
             ended ? "the driver could not synchronise: "
             : ok  ? "work already given to the GPU did not end in time"
                   : "no thread could be started to synchronise with",
             words ? words : "");
}
