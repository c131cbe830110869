/* The contexts that own memory. A thread of ours holds the context that it needs; its destruction waits. */
#include <stdlib.h>

#include "base/kiwi_preload.h"
#include "base/real.h"
#include "owner/blocks.h"
#include "owner/foreign.h"

#define KP_WARM_UP_BYTES 4096

/* A green context keeps its device's primary context alive. Memory allocated under a green context lives as long
 * as the primary context, so it counts as that context's: the pager's own streams must not end with the green one. */
struct green {
    struct green *next;
    CUgreenCtx handle;
    CUcontext context; /* what the program makes current */
    CUcontext primary;
    CUdevice device;
};

static struct green *greens;
static struct kp_ctx *contexts;
static pthread_cond_t let_go = PTHREAD_COND_INITIALIZER;

/* Returns whether the context is its device's primary one, which is retained only to compare the handles. */
static bool is_primary(CUcontext handle, CUdevice device) {
    unsigned flags;
    int active = 0;
    CUcontext primary = NULL;
    if (kp_real.cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS || !active) return false;
    if (kp_real.cuDevicePrimaryCtxRetain(&primary, device) != CUDA_SUCCESS) return false;
    kp_real.cuDevicePrimaryCtxRelease_v2(device);
    return primary == handle;
}

static struct kp_ctx *find(CUcontext handle) {
    struct kp_ctx *c = contexts;
    while (c && c->handle != handle) c = c->next;
    return c;
}

static CUcontext owner_of(CUcontext handle) { /* kp_table_mu held */
    struct green *g = greens;
    while (g && g->context != handle) g = g->next;
    return g ? g->primary : handle;
}

/* Returns NULL if there is no memory, or the context has just been destroyed. */
struct kp_ctx *kp_ctx_of(CUcontext handle, CUdevice device) {
    pthread_mutex_lock(&kp_table_mu);
    handle = owner_of(handle);
    struct kp_ctx *c = find(handle);
    if (!c) {
        pthread_mutex_unlock(&kp_table_mu);
        struct kp_ctx *fresh = calloc(1, sizeof *fresh);
        if (!fresh) return NULL;
        *fresh = (struct kp_ctx){.handle = handle, .device = device, .primary = is_primary(handle, device)};
        pthread_mutex_lock(&kp_table_mu);
        c = find(handle);
        if (!c) {
            c = fresh;
            c->next = contexts;
            contexts = c;
        } else {
            free(fresh);
        }
    }
    /* Another thread is releasing the context: it usually stays, because others retain a primary context. */
    while (c && c->going) {
        pthread_cond_wait(&let_go, &kp_table_mu);
        c = find(handle);
    }
    if (c) kp_ctx_hold(c);
    pthread_mutex_unlock(&kp_table_mu);
    return c;
}

bool kp_ctx_hold(struct kp_ctx *c) {
    if (c->going) return false;
    c->users++;
    return true;
}

void kp_ctx_let_go_locked(struct kp_ctx *c) {
    if (--c->users == 0) pthread_cond_broadcast(&let_go);
}

void kp_ctx_let_go(struct kp_ctx *c) {
    pthread_mutex_lock(&kp_table_mu);
    kp_ctx_let_go_locked(c);
    pthread_mutex_unlock(&kp_table_mu);
}

struct kp_block *kp_ctx_block_at(CUdeviceptr p) {
    struct kp_block *b;
    while ((b = kp_table_at(p)) && b->ctx && b->ctx->going) pthread_cond_wait(&let_go, &kp_table_mu);
    return b;
}

static bool any_going(void) {
    struct kp_ctx *c = contexts;
    while (c && !c->going) c = c->next;
    return c;
}

size_t kp_ctx_hold_all(struct kp_ctx ***list, bool owners) {
    size_t n = 0;
    pthread_mutex_lock(&kp_table_mu);
    while (!owners && any_going()) pthread_cond_wait(&let_go, &kp_table_mu);
    for (struct kp_ctx *c = contexts; c; c = c->next) n++;
    *list = n ? calloc(n, sizeof **list) : NULL;
    n = 0;
    for (struct kp_ctx *c = contexts; c && *list; c = c->next) {
        if ((!owners || __atomic_load_n(&c->owns, __ATOMIC_ACQUIRE)) && kp_ctx_hold(c)) (*list)[n++] = c;
    }
    pthread_mutex_unlock(&kp_table_mu);
    return n;
}

void kp_own_context_seen(CUcontext handle, CUdevice device) {
    struct kp_ctx *c = kp_forked ? NULL : kp_ctx_of(handle, device);
    if (!c) return;
    if (kp_owning()) kp_ctx_prepare(c);
    kp_ctx_let_go(c);
}

/* Copies once each way, so that the driver creates now what it creates at a stream's first copies. */
static void warm_up(CUstream stream) {
    CUdeviceptr there;
    void *here;
    if (kp_real.cuMemAlloc_v2(&there, KP_WARM_UP_BYTES) != CUDA_SUCCESS) return;
    if (kp_real.cuMemHostAlloc(&here, KP_WARM_UP_BYTES, 0) == CUDA_SUCCESS) {
        kp_real.cuMemcpyHtoDAsync_v2(there, here, KP_WARM_UP_BYTES, stream);
        kp_real.cuMemcpyDtoHAsync_v2(here, there, KP_WARM_UP_BYTES, stream);
        kp_real.cuStreamSynchronize(stream);
        kp_real.cuMemFreeHost(here);
    }
    kp_real.cuMemFree_v2(there);
}

/* Creates the pager's stream: a stream and its first copies take GPU memory, and a page-out may begin when there
 * is none left. */
CUresult kp_ctx_prepare(struct kp_ctx *c) {
    CUstream fresh = NULL, none = NULL;
    if (__atomic_load_n(&c->stream, __ATOMIC_ACQUIRE)) return CUDA_SUCCESS;
    CUresult rc = kp_ctx_push(c);
    if (rc != CUDA_SUCCESS) return rc;
    rc = kp_real.cuStreamCreate(&fresh, CU_STREAM_NON_BLOCKING);
    if (rc == CUDA_SUCCESS &&
        !__atomic_compare_exchange_n(&c->stream, &none, fresh, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        kp_real.cuStreamDestroy_v2(fresh); /* another thread was faster */
    else if (rc == CUDA_SUCCESS) warm_up(fresh);
    kp_ctx_pop(c);
    return rc;
}

struct kp_ctx *kp_ctx_hold_any(void) {
    pthread_mutex_lock(&kp_table_mu);
    struct kp_ctx *c = contexts;
    while (c && !kp_ctx_hold(c)) c = c->next;
    pthread_mutex_unlock(&kp_table_mu);
    return c;
}

struct kp_ctx *kp_ctx_lend(bool *made) {
    CUcontext primary;
    *made = false;
    pthread_mutex_lock(&kp_table_mu);
    struct kp_ctx *c = contexts;
    while (c && (c->device != kp_gpu.device || !kp_ctx_hold(c))) c = c->next;
    pthread_mutex_unlock(&kp_table_mu);
    if (c || kp_real.cuDevicePrimaryCtxRetain(&primary, kp_gpu.device) != CUDA_SUCCESS) return c;
    c = kp_ctx_of(primary, kp_gpu.device);
    *made = c != NULL;
    if (!c) kp_real.cuDevicePrimaryCtxRelease_v2(kp_gpu.device);
    return c;
}

void kp_ctx_take_back(struct kp_ctx *c, bool made) {
    kp_ctx_let_go(c);
    if (made) kp_own_primary_release(kp_gpu.device);
}

static __thread CUstreamCaptureMode mode_before;

CUresult kp_ctx_push(struct kp_ctx *c) {
    CUresult rc = kp_real.cuCtxPushCurrent_v2(c->handle);
    if (rc != CUDA_SUCCESS) return rc;
    mode_before = CU_STREAM_CAPTURE_MODE_RELAXED; /* our calls must not break another thread's capture */
    if (kp_real.cuThreadExchangeStreamCaptureMode(&mode_before) != CUDA_SUCCESS)
        mode_before = CU_STREAM_CAPTURE_MODE_GLOBAL;
    return CUDA_SUCCESS;
}

void kp_ctx_pop(struct kp_ctx *c) {
    CUcontext popped;
    (void)c;
    kp_real.cuThreadExchangeStreamCaptureMode(&mode_before);
    kp_real.cuCtxPopCurrent_v2(&popped);
}

CUresult kp_ctx_synchronize(struct kp_ctx *c) {
    CUresult rc = kp_ctx_push(c);
    if (rc != CUDA_SUCCESS) return rc;
    rc = kp_real.cuCtxSynchronize();
    kp_ctx_pop(c);
    return rc;
}

/* ---- the end of a context ---------------------------------------------------------------------- */

/* Returns the context's record, after our threads have let go of it; NULL: the context owns nothing. */
static struct kp_ctx *stop(CUcontext handle, bool primary_of, CUdevice device) {
    struct kp_ctx *c;
    pthread_mutex_lock(&kp_table_mu);
    for (;;) {
        c = contexts;
        while (c && !(primary_of ? c->primary && c->device == device : c->handle == handle)) c = c->next;
        if (!c || !c->going) break;
        pthread_cond_wait(&let_go, &kp_table_mu); /* another thread is releasing it: it may stay after all */
    }
    if (c) c->going = true;
    while (c && c->users) pthread_cond_wait(&let_go, &kp_table_mu);
    pthread_mutex_unlock(&kp_table_mu);
    return c;
}

struct gathering {
    struct kp_ctx *ctx;
    struct kp_block *first;
};

static void gather(struct kp_block *b, void *arg) {
    struct gathering *g = arg;
    if (b->ctx != g->ctx || b->dead) return;
    b->next_dead = g->first;
    g->first = b;
}

static void end_all(struct kp_block *b) {
    for (struct kp_block *next; b; b = next) {
        next = b->next_dead;
        kp_block_end(b);
    }
}

static void forget_greens(CUdevice device) { /* kp_table_mu held; their primary context is gone */
    for (struct green **at = &greens; *at;) {
        struct green *g = *at;
        if (g->device == device) {
            *at = g->next;
            free(g);
        } else {
            at = &g->next;
        }
    }
}

static void drop_all(struct kp_ctx *c) {
    struct gathering g = {c, NULL};
    pthread_mutex_lock(&kp_table_mu);
    kp_table_each(gather, &g);
    for (struct kp_block *b = g.first; b; b = b->next_dead) {
        kp_books_add(&kp_totals.small_overhead, -(int64_t)kp_block_overhead(b));
        kp_table_remove(b);
    }
    if (c->primary) forget_greens(c->device);
    struct kp_ctx **at = &contexts;
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    struct kp_block *freed = kp_own_take_dead_blocks(c);
    pthread_cond_broadcast(&let_go);
    pthread_mutex_unlock(&kp_table_mu);
    end_all(g.first);
    end_all(freed);
    kp_arena_context_gone(c->handle);
    kp_driven_context_gone(c->handle);
    free(c);
}

static void go_on(struct kp_ctx *c) {
    pthread_mutex_lock(&kp_table_mu);
    c->going = false;
    pthread_cond_broadcast(&let_go);
    pthread_mutex_unlock(&kp_table_mu);
}

CUresult kp_own_context_destroy(CUcontext handle) {
    struct kp_ctx *c = kp_forked ? NULL : stop(handle, false, 0);
    if (c) kp_own_end_dead_blocks(c);
    CUresult rc = kp_real.cuCtxDestroy_v2(handle);
    if (c && rc == CUDA_SUCCESS) drop_all(c);
    else if (c) go_on(c);
    return rc;
}

static struct kp_ctx *primary_stop(CUdevice device) {
    struct kp_ctx *c = kp_forked ? NULL : stop(NULL, true, device);
    if (c) kp_own_end_dead_blocks(c);
    return c;
}

static CUresult primary_given_back(struct kp_ctx *c, CUresult rc) {
    unsigned flags;
    int active = 1;
    if (!c) return rc;
    if (kp_real.cuDevicePrimaryCtxGetState(c->device, &flags, &active) != CUDA_SUCCESS) active = 1;
    if (rc == CUDA_SUCCESS && !active) drop_all(c);
    else go_on(c);
    return rc;
}

CUresult kp_own_primary_release(CUdevice device) {
    struct kp_ctx *c = primary_stop(device);
    return primary_given_back(c, kp_real.cuDevicePrimaryCtxRelease_v2(device));
}

CUresult kp_own_primary_reset(CUdevice device) {
    struct kp_ctx *c = primary_stop(device);
    return primary_given_back(c, kp_real.cuDevicePrimaryCtxReset_v2(device));
}

/* ---- green contexts ---------------------------------------------------------------------------- */

static void keep_green(struct green *g) {
    pthread_mutex_lock(&kp_table_mu);
    g->next = greens;
    greens = g;
    pthread_mutex_unlock(&kp_table_mu);
}

void kp_own_green_seen(CUgreenCtx handle, CUdevice device) {
    struct green *g = kp_forked ? NULL : calloc(1, sizeof *g);
    if (!g) return;
    *g = (struct green){.handle = handle, .device = device};
    if (kp_real.cuCtxFromGreenCtx(&g->context, handle) != CUDA_SUCCESS ||
        kp_real.cuDevicePrimaryCtxRetain(&g->primary, device) != CUDA_SUCCESS) {
        free(g);
        return;
    }
    kp_real.cuDevicePrimaryCtxRelease_v2(device); /* retained only to get its handle; the green context keeps it */
    keep_green(g);
    kp_own_context_seen(g->primary, device);
}

/* Removes the record before the driver destroys the context: the driver may then give the handle to a new context
 * of another thread. */
static struct green *take_green(CUgreenCtx handle) {
    pthread_mutex_lock(&kp_table_mu);
    struct green **at = &greens;
    while (*at && (*at)->handle != handle) at = &(*at)->next;
    struct green *g = *at;
    if (g) *at = g->next;
    pthread_mutex_unlock(&kp_table_mu);
    return g;
}

CUresult kp_own_green_destroy(CUgreenCtx handle) {
    struct green *g = kp_forked ? NULL : take_green(handle);
    struct kp_ctx *c = g ? primary_stop(g->device) : NULL;
    CUresult rc = kp_real.cuGreenCtxDestroy(handle);
    if (g && rc != CUDA_SUCCESS) keep_green(g);
    else free(g);
    return primary_given_back(c, rc);
}
