#define _GNU_SOURCE
#include "arena.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "blocks.h"
#include "fault.h"
#include "gate.h"
#include "hash.h"
#include "real.h"

#define PIECE_MAX_BYTES ((size_t)1 << 30) /* one registration of everything fails on big machines */
#define PIECES_PER_GPU 8                  /* small GPUs: small steps */
#define HOST_RESERVE_BYTES ((uint64_t)256 << 20) /* of the machine's memory, never taken */
#define BACKGROUND_NICE 10

struct piece {
    struct piece *next;
    char *base;
    size_t units, free_units;
    bool pinned;
    bool busy;  /* the background thread registers or unregisters it */
    bool stuck; /* the driver would not unregister it: kept for ever */
    CUcontext ctx;
    unsigned char taken[]; /* a byte per unit */
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; /* taken inside kp_table_mu, never around it */
static pthread_cond_t wanted = PTHREAD_COND_INITIALIZER;
static struct piece *pieces;
static struct kp_arena_books totals = {.limit = UINT64_MAX};
static uint64_t aim, keep = UINT64_MAX;
static bool enabled, started, refused;
static unsigned wakes; /* times something was new */
static int numa = -1;

static size_t piece_bytes(void) {
    size_t want = kp_gpu.total_bytes / PIECES_PER_GPU / KP_ARENA_UNIT * KP_ARENA_UNIT;
    return want < KP_ARENA_UNIT ? KP_ARENA_UNIT : want > PIECE_MAX_BYTES ? PIECE_MAX_BYTES : want;
}

static uint64_t there(void) { return totals.pinned + totals.pageable; }

/* ---- pieces (mu held, but for the slow parts) ---------------------------------------------------- */

static struct piece *new_piece(size_t bytes) {
    size_t units = bytes / KP_ARENA_UNIT;
    struct piece *p = calloc(1, sizeof *p + units);
    if (p) p->base = kp_host_map(bytes, numa);
    if (!p || !p->base) {
        free(p);
        return NULL;
    }
    p->units = p->free_units = units;
    return p;
}

static uint64_t growth(void) { /* bytes of new pieces that limit and machine allow */
    uint64_t by_limit = totals.limit > there() ? totals.limit - there() : 0;
    uint64_t host = kp_host_available();
    /* pages of pageable pieces that were never touched are not in the machine's count: they are
     * few, because pieces come one at a time and only when the ones before are full */
    uint64_t by_host = host > HOST_RESERVE_BYTES ? host - HOST_RESERVE_BYTES : 0;
    uint64_t least = by_limit < by_host ? by_limit : by_host;
    return least / KP_ARENA_UNIT * KP_ARENA_UNIT;
}

static struct piece *grow_pageable(size_t need) {
    if (kp_fault(KP_FAULT_HOST)) return NULL;
    size_t bytes = need > piece_bytes() ? need : piece_bytes();
    uint64_t may = growth();
    if (may < bytes) bytes = need; /* just what is needed, then */
    if (bytes > PIECE_MAX_BYTES) bytes = PIECE_MAX_BYTES;
    if (bytes > may) bytes = (size_t)may;
    struct piece *p = bytes ? new_piece(bytes) : NULL;
    if (!p) return NULL;
    p->next = pieces;
    pieces = p;
    totals.pageable += bytes;
    return p;
}

/* The first run of `want` free units, or else the longest there is. */
static size_t find_run(const struct piece *p, size_t want, size_t *start) {
    size_t best = 0;
    for (size_t i = 0; i < p->units && best < want;) {
        size_t n = 0;
        while (i + n < p->units && n < want && !p->taken[i + n]) n++;
        if (n > best) best = n, *start = i;
        i += n + 1;
    }
    return best;
}

static bool add_extent(struct kp_copy *copy, struct piece *p, size_t start, size_t n) {
    struct kp_extent *more = realloc(copy->extents, (copy->count + 1) * sizeof *more);
    if (!more) return false;
    copy->extents = more;
    more[copy->count++] = (struct kp_extent){p->base + start * KP_ARENA_UNIT, n * KP_ARENA_UNIT};
    memset(&p->taken[start], 1, n);
    p->free_units -= n;
    totals.used += n * KP_ARENA_UNIT;
    return true;
}

static size_t take_from(struct kp_copy *copy, struct piece *only, bool pinned, size_t want) {
    struct piece *best = NULL;
    size_t longest = 0, at = 0;
    for (struct piece *p = only ? only : pieces; p && longest < want; p = only ? NULL : p->next) {
        size_t start = 0;
        if (p->busy || p->pinned != pinned || p->free_units == 0) continue;
        size_t n = find_run(p, want, &start);
        if (n > longest) longest = n, best = p, at = start;
    }
    return longest && add_extent(copy, best, at, longest) ? longest : 0;
}

static void give(struct kp_copy *copy) {
    for (unsigned i = 0; i < copy->count; i++) {
        struct kp_extent e = copy->extents[i];
        struct piece *p = pieces;
        while (e.at < p->base || e.at >= p->base + p->units * KP_ARENA_UNIT) p = p->next;
        size_t n = e.bytes / KP_ARENA_UNIT;
        memset(&p->taken[(size_t)(e.at - p->base) / KP_ARENA_UNIT], 0, n);
        p->free_units += n;
        totals.used -= e.bytes;
    }
    free(copy->extents);
    *copy = (struct kp_copy){0};
}

bool kp_arena_take(struct kp_copy *copy, size_t bytes) {
    size_t left = (bytes + KP_ARENA_UNIT - 1) / KP_ARENA_UNIT;
    *copy = (struct kp_copy){0};
    pthread_mutex_lock(&mu);
    while (left) {
        size_t got = take_from(copy, NULL, true, left);
        if (!got) got = take_from(copy, NULL, false, left);
        if (!got) {
            struct piece *p = grow_pageable(left * KP_ARENA_UNIT);
            if (p) got = take_from(copy, p, false, left);
        }
        if (!got) break;
        left -= got;
    }
    if (left) give(copy);
    pthread_mutex_unlock(&mu);
    return left == 0;
}

void kp_arena_give(struct kp_copy *copy) {
    if (copy->count == 0) return;
    pthread_mutex_lock(&mu);
    give(copy);
    if (there() > totals.limit) pthread_cond_signal(&wanted);
    pthread_mutex_unlock(&mu);
}

size_t kp_copy_bytes(const struct kp_copy *copy) {
    size_t sum = 0;
    for (unsigned i = 0; i < copy->count; i++) sum += copy->extents[i].bytes;
    return sum;
}

uint64_t kp_arena_room(void) {
    pthread_mutex_lock(&mu);
    uint64_t room = growth();
    for (struct piece *p = pieces; p; p = p->next) room += p->busy ? 0 : p->free_units * KP_ARENA_UNIT;
    pthread_mutex_unlock(&mu);
    return room;
}

void kp_arena_books(struct kp_arena_books *out) {
    pthread_mutex_lock(&mu);
    *out = totals;
    pthread_mutex_unlock(&mu);
}

/* ---- the background thread -------------------------------------------------------------------------- */

static bool pin(struct piece *p, bool on) { /* slow: outside mu */
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

static void count(struct piece *p, bool pinned) {
    uint64_t bytes = p->units * KP_ARENA_UNIT;
    p->pinned = pinned;
    *(pinned ? &totals.pageable : &totals.pinned) -= bytes;
    *(pinned ? &totals.pinned : &totals.pageable) += bytes;
}

/* A free pageable piece, or a new one; NULL: there is nothing to pin, or nothing to pin it with. */
static struct piece *next_to_pin(void) {
    if (!enabled || refused || totals.pinned >= aim) return NULL;
    for (struct piece *p = pieces; p; p = p->next) {
        if (!p->pinned && !p->busy && p->free_units == p->units) return p;
    }
    return growth() >= piece_bytes() ? grow_pageable(piece_bytes()) : NULL;
}

static void pin_one(struct piece *p) { /* mu held */
    p->busy = true;
    pthread_mutex_unlock(&mu);
    kp_host_touch(p->base, p->units * KP_ARENA_UNIT);
    bool ok = pin(p, true);
    pthread_mutex_lock(&mu);
    p->busy = false;
    if (ok) count(p, true);
    else refused = true, totals.refused++; /* not tried again before the link says something new */
}

static struct piece *next_to_free(void) {
    uint64_t most = totals.limit < keep ? totals.limit : keep;
    for (struct piece *p = pieces; p && there() > most; p = p->next) {
        if (!p->busy && !p->stuck && p->free_units == p->units) return p;
    }
    keep = UINT64_MAX; /* a wish, once; the limit is for ever */
    return NULL;
}

static void free_one(struct piece *p) { /* mu held */
    p->busy = true;
    pthread_mutex_unlock(&mu);
    bool ok = !p->pinned || pin(p, false);
    pthread_mutex_lock(&mu);
    if (!ok && p->pinned) { /* unmapping what the GPU may still reach is worse than keeping it */
        p->busy = false;
        p->stuck = true;
        return;
    }
    struct piece **at = &pieces;
    while (*at != p) at = &(*at)->next;
    *at = p->next;
    *(p->pinned ? &totals.pinned : &totals.pageable) -= p->units * KP_ARENA_UNIT;
    kp_host_unmap(p->base, p->units * KP_ARENA_UNIT);
    free(p);
}

static void prepare_hashes(void) { /* slow: outside mu */
    struct kp_ctx **list;
    size_t n = kp_ctx_hold_all(&list);
    for (size_t i = 0; i < n; i++) {
        kp_hash_prepare(list[i]);
        kp_ctx_let_go(list[i]);
    }
    free(list);
}

static void *background(void *arg) {
    (void)arg;
    kp_gate_exempt();
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), BACKGROUND_NICE);
    int node = kp_host_numa_node(kp_gpu.device);
    unsigned prepared = 0;
    pthread_mutex_lock(&mu);
    if (numa < 0) numa = node;
    for (;;) {
        struct piece *p;
        if (enabled && prepared != wakes) {
            prepared = wakes;
            pthread_mutex_unlock(&mu);
            prepare_hashes();
            pthread_mutex_lock(&mu);
        }
        if ((p = next_to_free())) free_one(p);
        else if ((p = next_to_pin())) pin_one(p);
        else pthread_cond_wait(&wanted, &mu);
    }
    return NULL;
}

static void wake(void) { /* mu held */
    wakes++;
    if (started || kp_forked || !kp_gpu.known) {
        pthread_cond_signal(&wanted);
        return;
    }
    pthread_t thread;
    pthread_attr_t a;
    sigset_t all, old;
    pthread_attr_init(&a);
    pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* signals stay with the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    started = pthread_create(&thread, &a, background, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&a);
}

void kp_arena_enable(bool on) {
    pthread_mutex_lock(&mu);
    enabled = on;
    refused = false;
    wake();
    pthread_mutex_unlock(&mu);
}

void kp_arena_limit(uint64_t bytes) {
    pthread_mutex_lock(&mu);
    totals.limit = bytes;
    refused = false;
    wake();
    pthread_mutex_unlock(&mu);
}

void kp_arena_trim(uint64_t keep_bytes) {
    pthread_mutex_lock(&mu);
    keep = keep_bytes;
    if (aim > keep_bytes) aim = keep_bytes; /* nor is it pinned again at once */
    wake();
    pthread_mutex_unlock(&mu);
}

void kp_arena_numa(int node) {
    pthread_mutex_lock(&mu);
    numa = node;
    pthread_mutex_unlock(&mu);
}

void kp_arena_wake(void) {
    pthread_mutex_lock(&mu);
    if (enabled) wake();
    pthread_mutex_unlock(&mu);
}

void kp_arena_aim(uint64_t bytes) {
    if (bytes <= __atomic_load_n(&aim, __ATOMIC_RELAXED)) return;
    pthread_mutex_lock(&mu);
    __atomic_store_n(&aim, bytes, __ATOMIC_RELAXED);
    if (enabled && totals.pinned < bytes) wake();
    pthread_mutex_unlock(&mu);
}

void kp_arena_context_gone(CUcontext ctx) {
    pthread_mutex_lock(&mu);
    for (struct piece *p = pieces; p; p = p->next) {
        if (p->ctx != ctx) continue;
        if (p->pinned) count(p, false); /* registered for a context that is no more */
        p->ctx = NULL;
    }
    pthread_mutex_unlock(&mu);
}
