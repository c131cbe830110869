/* The arena's thread: pins memory that may be needed and gives back what is not. All of this is slow, and none of
 * it is on the switch path. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/daemon.h"
#include "base/kiwi_preload.h"
#include "base/real.h"
#include "base/tested.h"
#include "gate/gate.h"
#include "owner/blocks.h"
#include "owner/pieces.h"

#define BACKGROUND_NICE 10
#define SMALLEST 8     /* a piece below 1/SMALLEST of a full one is not worth its registration */
#define STOP_STEP_NS 1000000l /* a registration takes a tenth of a second or a few */
#define SPARE_PIECES 2 /* pinned pieces that may stay although no owned memory needs them */

static pthread_cond_t wanted = PTHREAD_COND_INITIALIZER;
static uint64_t aim, keep = UINT64_MAX, allowed = UINT64_MAX;
static bool enabled, started, refused;
static bool limit_awaited; /* nothing is pinned before the daemon has set its first limit */
static bool stopped, idle; /* the thread must leave the driver alone; the thread sleeps */

static bool pin(struct kp_piece *p, bool on) { /* slow: outside kp_arena_mu */
    struct kp_ctx *ctx = kp_ctx_hold_any();
    if (!ctx) return false;
    CUresult rc = kp_fault(KP_FAULT_PIN) ? CUDA_ERROR_OUT_OF_MEMORY : kp_ctx_push(ctx);
    if (rc == CUDA_SUCCESS) {
        size_t bytes = p->units * KP_ARENA_UNIT;
        if (on) rc = kp_real.cuMemHostRegister_v2(p->base, bytes, CU_MEMHOSTREGISTER_PORTABLE);
        else rc = kp_real.cuMemHostUnregister(p->base);
        kp_ctx_pop(ctx);
    }
    if (rc == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) rc = CUDA_SUCCESS;
    if (on && rc == CUDA_SUCCESS) p->ctx = ctx->handle;
    kp_ctx_let_go(ctx);
    return rc == CUDA_SUCCESS;
}

/* Returns a free pageable piece, or a new one; NULL: nothing needs pinning, or no memory can be pinned. Returns
 * NULL while memory is out: the pieces that hold it become free and are pinned later, and the driver may be about
 * to lock the program. */
static struct kp_piece *next_to_pin(void) {
    if (!enabled || refused || limit_awaited || kp_arena_totals.pinned >= aim) return NULL;
    if (__atomic_load_n(&kp_totals.out, __ATOMIC_RELAXED)) return NULL;
    for (struct kp_piece *p = kp_pieces; p; p = p->next) {
        if (!p->pinned && !p->busy && p->free_units == p->units) return p;
    }
    uint64_t most = kp_arena_advance_bytes(), there = kp_arena_total_bytes(), bytes = kp_piece_bytes();
    uint64_t may = most > there ? (most - there) / KP_ARENA_UNIT * KP_ARENA_UNIT : 0;
    if (may < bytes) bytes = may >= bytes / SMALLEST ? may : 0;
    return bytes && kp_arena_growth() >= bytes && kp_host_to_spare(bytes) ? kp_piece_of_size(bytes) : NULL;
}

uint64_t kp_arena_advance_bytes(void) { return allowed; }

static void pin_one(struct kp_piece *p) { /* kp_arena_mu held */
    p->busy = true;
    pthread_mutex_unlock(&kp_arena_mu);
    bool ok = kp_pages_fault_in(p->base, p->units * KP_ARENA_UNIT) && pin(p, true);
    pthread_mutex_lock(&kp_arena_mu);
    p->busy = false;
    if (ok) kp_piece_count(p, true);
    else refused = true, kp_arena_totals.refused++; /* no other try before the link changes a setting */
    kp_daemon_books_changed();
}

static struct kp_piece *next_to_free(void) {
    uint64_t most = kp_arena_advance_bytes();
    if (keep < most) most = keep;
    for (struct kp_piece *p = kp_pieces; p && kp_arena_total_bytes() > most; p = p->next) {
        if (!p->busy && !p->stuck && p->free_units == p->units) return p;
    }
    keep = UINT64_MAX; /* applies once; the limit stays */
    return NULL;
}

static void free_one(struct kp_piece *p) { /* kp_arena_mu held */
    bool was = p->pinned; /* its context may be destroyed meanwhile */
    p->busy = true;
    pthread_mutex_unlock(&kp_arena_mu);
    bool ok = !was || pin(p, false);
    pthread_mutex_lock(&kp_arena_mu);
    if (!ok && p->pinned) { /* unmapping memory that the GPU may still reach is worse than keeping it */
        p->busy = false;
        p->stuck = true;
        return;
    }
    struct kp_piece **at = &kp_pieces;
    while (*at != p) at = &(*at)->next;
    *at = p->next;
    *(p->pinned ? &kp_arena_totals.pinned : &kp_arena_totals.pageable) -= p->units * KP_ARENA_UNIT;
    kp_host_unmap(p->base, p->units * KP_ARENA_UNIT);
    free(p);
    kp_daemon_books_changed();
}

static void rest(void) { /* kp_arena_mu held */
    idle = true;
    pthread_cond_wait(&wanted, &kp_arena_mu);
    idle = false;
}

static void *background(void *arg) {
    (void)arg;
    kp_gate_exempt();
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), BACKGROUND_NICE);
    int node = kp_host_numa_node(kp_gpu.device);
    pthread_mutex_lock(&kp_arena_mu);
    if (kp_arena_node < 0) kp_arena_node = node;
    for (;;) {
        struct kp_piece *p;
        if (stopped) {
            rest();
            continue;
        }
        if ((p = next_to_free())) free_one(p);
        else if ((p = next_to_pin())) pin_one(p);
        else rest();
    }
    return NULL;
}

bool kp_arena_stop(bool on, int64_t until_ns) {
    pthread_mutex_lock(&kp_arena_mu);
    stopped = on;
    if (!on && started) pthread_cond_signal(&wanted);
    while (on && started && !idle && kp_now_ns() < until_ns) {
        pthread_mutex_unlock(&kp_arena_mu);
        nanosleep(&(struct timespec){.tv_nsec = STOP_STEP_NS}, NULL);
        pthread_mutex_lock(&kp_arena_mu);
    }
    bool good = !on || !started || idle;
    pthread_mutex_unlock(&kp_arena_mu);
    return good;
}

void kp_pinning_wake(void) { /* kp_arena_mu held */
    if (started || kp_forked || !kp_gpu.known) pthread_cond_signal(&wanted);
    else started = kp_start_thread(background);
}

void kp_arena_enable(bool on) {
    pthread_mutex_lock(&kp_arena_mu);
    enabled = on;
    refused = false;
    kp_pinning_wake();
    pthread_mutex_unlock(&kp_arena_mu);
}

void kp_arena_allow(uint64_t bytes) {
    pthread_mutex_lock(&kp_arena_mu);
    if (bytes > allowed) refused = false;
    bool changed = bytes != allowed || limit_awaited;
    allowed = bytes;
    limit_awaited = false;
    if (changed && (enabled || kp_arena_total_bytes() > bytes)) kp_pinning_wake();
    pthread_mutex_unlock(&kp_arena_mu);
}

void kp_arena_await_limit(void) {
    pthread_mutex_lock(&kp_arena_mu);
    limit_awaited = true;
    pthread_mutex_unlock(&kp_arena_mu);
}

void kp_arena_wake(void) {
    pthread_mutex_lock(&kp_arena_mu);
    if (enabled) kp_pinning_wake();
    pthread_mutex_unlock(&kp_arena_mu);
}

void kp_arena_aim(uint64_t bytes) {
    if (bytes == __atomic_load_n(&aim, __ATOMIC_RELAXED)) return;
    pthread_mutex_lock(&kp_arena_mu);
    uint64_t spare = 2 * bytes + SPARE_PIECES * kp_piece_bytes();
    __atomic_store_n(&aim, bytes, __ATOMIC_RELAXED);
    if (kp_arena_totals.pinned > spare) keep = spare;
    if (enabled && (kp_arena_totals.pinned < bytes || kp_arena_totals.pinned > spare)) kp_pinning_wake();
    pthread_mutex_unlock(&kp_arena_mu);
}

/* Gets how many bytes of host memory are pinned, how many are pageable, and how many may have to be paged
 * out. The last number is pinned in the end if no limit prevents it; the daemon raises its limit late, when
 * it has learnt of the memory. Returns 1 if pinning is under way or done, 0 if no more memory will be pinned.
 * For programs that measure moves and should wait for the pinning. */
KP_API __attribute__((used)) int kiwi_preload_pinned(uint64_t *pinned, uint64_t *pageable, uint64_t *wanted) {
    pthread_mutex_lock(&kp_arena_mu);
    *pinned = kp_arena_totals.pinned;
    *pageable = kp_arena_totals.pageable;
    *wanted = aim;
    int coming = !refused;
    pthread_mutex_unlock(&kp_arena_mu);
    return coming;
}
