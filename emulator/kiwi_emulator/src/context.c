/* Contexts: a process's hold on a GPU. Each context costs context_bytes of the GPU's memory. */
#include <stdlib.h>

#include "emu.h"

/* By CUlimit: stack, printf and heap, nested launches (depth, count), L2 fetch granularity, persisting L2,
 * and limits of CIG contexts, which are not emulated. */
static const size_t default_limits[KE_LIMITS] = {1024, 1u << 20, 8u << 20, 2, 2048, 64, 0, 0, 0, 0};

static __thread CUcontext stack[KE_CTX_STACK_MAX];
static __thread int depth;

CUcontext ke_current_or_null(void) { return depth ? stack[depth - 1] : NULL; }

/* Checks a handle. Structs of destroyed contexts are kept, so that a stale handle gets an error, not a crash. */
CUresult ke_context_check(CUcontext ctx) {
    if (!ctx) return CUDA_ERROR_INVALID_CONTEXT;
    for (CUcontext c = ke.contexts; c; c = c->next) {
        if (c == ctx) return c->alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    return CUDA_ERROR_INVALID_CONTEXT;
}

CUresult ke_current(CUcontext *ctx) {
    CUcontext c = ke_current_or_null();
    if (!c) return CUDA_ERROR_INVALID_CONTEXT;
    if (!c->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *ctx = c;
    return c->error;
}

static CUresult bring_up(CUcontext c) {
    unsigned gpu = ke.devices[c->dev].gpu;
    uint64_t bytes = ke.state->context_bytes;
    if (ke_charge(ke.state, ke.slot, gpu, 0, (int64_t)bytes) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = ke_stream_new(c, 0, 0, &c->null_stream);
    if (rc != CUDA_SUCCESS) {
        ke_charge(ke.state, ke.slot, gpu, 0, -(int64_t)bytes);
        return rc;
    }
    c->alive = true;
    c->error = CUDA_SUCCESS;
    return CUDA_SUCCESS;
}

CUcontext ke_context_new(unsigned dev, unsigned flags, bool primary) {
    CUcontext c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->dev = dev;
    c->flags = flags;
    c->primary = primary;
    c->version = 3020;
    memcpy(c->limits, default_limits, sizeof c->limits);
    c->id = ++ke.next_id;
    c->next = ke.contexts;
    ke.contexts = c;
    return c;
}

static void tear_down(CUcontext c) { /* ke.mu held; the context's work has ended */
    for (CUcontext o = ke.contexts; o; o = o->next) {
        if (o->green_of == c && o->alive) o->alive = false;
    }
    ke_free_context(c);
    ke_streams_end(c);
    c->alive = false;
    uint64_t held = ke.slot->context_bytes[ke.devices[c->dev].gpu];
    uint64_t bytes = ke.state->context_bytes;
    if (bytes > held) bytes = held; /* the cost was changed meanwhile */
    bool last = true;
    for (CUcontext o = ke.contexts; o; o = o->next) last = last && !(o->alive && o->dev == c->dev);
    ke_charge(ke.state, ke.slot, ke.devices[c->dev].gpu, 0, -(int64_t)(last ? held : bytes));
}

/* ---- primary contexts ------------------------------------------------------------------------ */

CUresult ke_primary_retain(CUcontext *out, CUdevice dev) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (dev < 0 || (unsigned)dev >= ke.device_count) return CUDA_ERROR_INVALID_DEVICE;
    struct ke_device *d = &ke.devices[dev];
    ke_mu_lock();
    CUresult rc = CUDA_SUCCESS;
    if (!d->primary) d->primary = ke_context_new((unsigned)dev, d->primary_flags, true);
    if (!d->primary) rc = CUDA_ERROR_OUT_OF_MEMORY;
    if (rc == CUDA_SUCCESS && !d->primary->alive) {
        d->primary->flags = d->primary_flags;
        rc = bring_up(d->primary);
    }
    if (rc == CUDA_SUCCESS) {
        d->primary_refs++;
        *out = d->primary;
    }
    ke_mu_unlock();
    return rc;
}

/* Returns whether retaining the context only counts: making it needs GPU memory. */
static bool primary_is_there(CUdevice dev) {
    if (dev < 0 || (unsigned)dev >= ke.device_count) return true;
    ke_mu_lock();
    bool there = ke.devices[dev].primary && ke.devices[dev].primary->alive;
    ke_mu_unlock();
    return there;
}
KE_API CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) {
    if (ke_held(KE_QUESTIONS_PASS) != KE_FREE && primary_is_there(dev)) return ke_primary_retain(pctx, dev);
    KE_CALL(ke_primary_retain(pctx, dev));
}

CUresult ke_primary_release(CUdevice dev, bool reset) {
    if (dev < 0 || (unsigned)dev >= ke.device_count) return CUDA_ERROR_INVALID_DEVICE;
    struct ke_device *d = &ke.devices[dev];
    ke_mu_lock();
    if (!reset && d->primary_refs == 0) {
        ke_mu_unlock();
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (!reset) d->primary_refs--;
    bool down = d->primary && d->primary->alive && (reset || d->primary_refs == 0);
    ke_mu_unlock();
    if (!down) return CUDA_SUCCESS;
    ke_wait_context(d->primary);
    ke_mu_lock();
    if (d->primary->alive) tear_down(d->primary);
    ke_mu_unlock();
    return CUDA_SUCCESS;
}

KE_FORWARD(cuDevicePrimaryCtxRelease_v2, (CUdevice dev), ke_primary_release(dev, false))
KE_FORWARD(cuDevicePrimaryCtxReset_v2, (CUdevice dev), ke_primary_release(dev, true))

KE_ENTRY(cuDevicePrimaryCtxSetFlags_v2, (CUdevice dev, unsigned flags), (dev, flags)) {
    if (dev < 0 || (unsigned)dev >= ke.device_count) return CUDA_ERROR_INVALID_DEVICE;
    ke.devices[dev].primary_flags = flags;
    if (ke.devices[dev].primary) ke.devices[dev].primary->flags = flags;
    return CUDA_SUCCESS;
}

KE_ENTRY(cuDevicePrimaryCtxGetState, (CUdevice dev, unsigned *flags, int *active), (dev, flags, active)) {
    if (dev < 0 || (unsigned)dev >= ke.device_count) return CUDA_ERROR_INVALID_DEVICE;
    if (!flags || !active) return CUDA_ERROR_INVALID_VALUE;
    *flags = ke.devices[dev].primary_flags;
    *active = ke.devices[dev].primary && ke.devices[dev].primary->alive;
    return CUDA_SUCCESS;
}

/* ---- contexts made by the program, and the stack of each thread ------------------------------ */

static CUresult create(CUcontext *out, unsigned flags, CUdevice dev) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (dev < 0 || (unsigned)dev >= ke.device_count) return CUDA_ERROR_INVALID_DEVICE;
    if (depth == KE_CTX_STACK_MAX) return CUDA_ERROR_OUT_OF_MEMORY;
    ke_mu_lock();
    CUcontext c = ke_context_new((unsigned)dev, flags, false);
    CUresult rc = c ? bring_up(c) : CUDA_ERROR_OUT_OF_MEMORY;
    ke_mu_unlock();
    if (rc == CUDA_SUCCESS) *out = stack[depth++] = c;
    return rc;
}
KE_FORWARD(cuCtxCreate_v2, (CUcontext *pctx, unsigned flags, CUdevice dev), create(pctx, flags, dev))
KE_FORWARD(cuCtxCreate_v3, (CUcontext *pctx, CUexecAffinityParam *params, int count, unsigned flags, CUdevice dev),
           params || count ? CUDA_ERROR_NOT_SUPPORTED : create(pctx, flags, dev))
KE_FORWARD(cuCtxCreate_v4, (CUcontext *pctx, CUctxCreateParams *params, unsigned flags, CUdevice dev),
           params ? CUDA_ERROR_NOT_SUPPORTED : create(pctx, flags, dev))

KE_ENTRY(cuCtxDestroy_v2, (CUcontext ctx), (ctx)) {
    ke_mu_lock();
    CUresult rc = ke_context_check(ctx);
    ke_mu_unlock();
    if (rc != CUDA_SUCCESS) return rc;
    if (ctx->primary) return CUDA_ERROR_INVALID_CONTEXT;
    ke_wait_context(ctx);
    ke_mu_lock();
    if (ctx->alive) tear_down(ctx);
    ke_mu_unlock();
    if (depth && stack[depth - 1] == ctx) depth--;
    return CUDA_SUCCESS;
}

KE_ENTRY(cuCtxPushCurrent_v2, (CUcontext ctx), (ctx)) {
    ke_mu_lock();
    CUresult rc = ke_context_check(ctx);
    ke_mu_unlock();
    if (rc == CUDA_SUCCESS && depth == KE_CTX_STACK_MAX) rc = CUDA_ERROR_OUT_OF_MEMORY;
    if (rc == CUDA_SUCCESS) stack[depth++] = ctx;
    return rc;
}

KE_ENTRY(cuCtxPopCurrent_v2, (CUcontext *out), (out)) {
    if (depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (out) *out = stack[depth];
    return CUDA_SUCCESS;
}

KE_ENTRY(cuCtxSetCurrent, (CUcontext ctx), (ctx)) {
    if (!ctx) {
        if (depth) depth--;
        return CUDA_SUCCESS;
    }
    ke_mu_lock();
    CUresult rc = ke_context_check(ctx);
    ke_mu_unlock();
    if (rc != CUDA_SUCCESS) return rc;
    if (depth == 0) depth = 1;
    stack[depth - 1] = ctx;
    return CUDA_SUCCESS;
}

static CUresult get_current(CUcontext *out) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = ke_current_or_null();
    return CUDA_SUCCESS;
}
KE_API CUresult cuCtxGetCurrent(CUcontext *pctx) { KE_CALL_ANSWERED(KE_QUESTIONS_PASS, get_current(pctx)); }

/* ---- queries --------------------------------------------------------------------------------- */

static CUresult pick(CUcontext asked, CUcontext *out) {
    if (!asked) return ke_current(out);
    ke_mu_lock();
    CUresult rc = ke_context_check(asked);
    ke_mu_unlock();
    *out = asked;
    return rc;
}

static CUresult get_device(CUdevice *dev, CUcontext ctx) {
    if (!dev) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = pick(ctx, &ctx);
    if (rc == CUDA_SUCCESS) *dev = (CUdevice)ctx->dev;
    return rc;
}
KE_FORWARD(cuCtxGetDevice, (CUdevice *device), get_device(device, NULL))
KE_FORWARD(cuCtxGetDevice_v2, (CUdevice *device, CUcontext ctx), get_device(device, ctx))

static CUresult synchronize(CUcontext ctx) {
    CUresult rc = pick(ctx, &ctx);
    if (rc == CUDA_SUCCESS) rc = ke_capture_touch_context(ctx);
    if (rc != CUDA_SUCCESS) return rc;
    ke_wait_context(ctx);
    return ctx->error;
}
KE_API CUresult cuCtxSynchronize(void) { KE_CALL_UNHELD(KE_SYNC_CRASHES, synchronize(NULL)); }
KE_API CUresult cuCtxSynchronize_v2(CUcontext ctx) { KE_CALL_UNHELD(KE_SYNC_CRASHES, synchronize(ctx)); }

KE_ENTRY(cuCtxGetFlags, (unsigned *flags), (flags)) {
    CUcontext c;
    if (!flags) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = ke_current(&c);
    if (rc == CUDA_SUCCESS) *flags = c->flags;
    return rc;
}

KE_ENTRY(cuCtxGetId, (CUcontext ctx, unsigned long long *id), (ctx, id)) {
    if (!id) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = pick(ctx, &ctx);
    if (rc == CUDA_SUCCESS) *id = ctx->id;
    return rc;
}

KE_ENTRY(cuCtxGetApiVersion, (CUcontext ctx, unsigned *version), (ctx, version)) {
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = pick(ctx, &ctx);
    if (rc == CUDA_SUCCESS) *version = ctx->version;
    return rc;
}

KE_ENTRY(cuCtxGetStreamPriorityRange, (int *least, int *greatest), (least, greatest)) {
    CUcontext c;
    CUresult rc = ke_current(&c);
    if (rc != CUDA_SUCCESS) return rc;
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

KE_ENTRY(cuCtxGetLimit, (size_t *value, CUlimit limit), (value, limit)) {
    CUcontext c;
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = ke_current(&c);
    if (rc != CUDA_SUCCESS) return rc;
    if ((unsigned)limit >= KE_LIMITS) return CUDA_ERROR_UNSUPPORTED_LIMIT;
    *value = c->limits[(unsigned)limit];
    return CUDA_SUCCESS;
}

static CUresult need_context(void) {
    CUcontext c;
    return ke_current(&c);
}
/* Stores a limit, which has no effect: kernels are built in. */
KE_ENTRY(cuCtxSetLimit, (CUlimit limit, size_t value), (limit, value)) {
    CUcontext c;
    CUresult rc = ke_current(&c);
    if (rc != CUDA_SUCCESS) return rc;
    if ((unsigned)limit >= KE_LIMITS) return CUDA_ERROR_UNSUPPORTED_LIMIT;
    c->limits[(unsigned)limit] = value;
    return CUDA_SUCCESS;
}
KE_API CUresult cuCtxSetCacheConfig(CUfunc_cache config) {
    (void)config;
    KE_CALL(need_context());
}

KE_ENTRY(cuCtxGetCacheConfig, (CUfunc_cache *config), (config)) {
    if (!config) return CUDA_ERROR_INVALID_VALUE;
    *config = 0;
    return need_context();
}
