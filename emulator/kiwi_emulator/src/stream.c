/* Streams: a queue and a worker thread each. Order between streams is by (stream, sequence). */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "emu.h"

#define THREAD_STACK (256u << 10)

struct ke_job {
    struct ke_job *next;
    ke_job_fn fn;
    unsigned flags;
    size_t dep_count;
    struct ke_dep *deps;
    _Alignas(16) char arg[];
};

static __thread CUstream per_thread;

/* ---- the worker -------------------------------------------------------------------------------- */

static bool ready(const struct ke_job *j) {
    for (size_t i = 0; i < j->dep_count; i++) {
        if (j->deps[i].stream->completed < j->deps[i].seq) return false;
    }
    return true;
}

static void busy(CUcontext ctx, int change) { /* records the GPU's busy time, for NVML */
    struct ke_device *d = &ke.devices[ctx->dev];
    if (!ke_proc_ours(ke.slot)) return;
    uint64_t now = ke_now_ns(), *since = &ke.slot->busy_since_ns[d->gpu];
    if (change > 0 && d->busy++ == 0) __atomic_store_n(since, now, __ATOMIC_RELEASE);
    if (change < 0 && --d->busy == 0) {
        ke.slot->busy_ns[d->gpu] += now - *since;
        __atomic_store_n(since, 0, __ATOMIC_RELEASE);
    }
}

/* Runs a job; ke.mu held. Work whose memory is unmapped meanwhile fails, as with the real driver. */
static CUresult run(CUstream s, struct ke_job *j) {
    uint64_t unmaps = ke.unmaps;
    pthread_mutex_unlock(&ke.mu);
    ke_touch_nothing();
    CUresult rc = j->fn(s->ctx, j->arg);
    pthread_mutex_lock(&ke.mu);
    bool look = rc == CUDA_SUCCESS && unmaps != ke.unmaps;
    pthread_mutex_unlock(&ke.mu);
    if (look && !ke_touched_all_there()) rc = CUDA_ERROR_ILLEGAL_ADDRESS;
    pthread_mutex_lock(&ke.mu);
    return rc;
}

static void *work(void *arg) {
    CUstream s = arg;
    pthread_mutex_lock(&ke.mu);
    for (;;) {
        struct ke_job *j = s->head;
        if (!j) {
            pthread_cond_wait(&s->more, &ke.mu);
            continue;
        }
        while (!ready(j)) pthread_cond_wait(&ke.done, &ke.mu);
        CUresult rc = CUDA_SUCCESS;
        if (j->fn) {
            if (j->flags & KE_JOB_KERNEL) busy(s->ctx, 1);
            rc = run(s, j);
            if (j->flags & KE_JOB_KERNEL) busy(s->ctx, -1);
        }
        if (rc != CUDA_SUCCESS && s->ctx->error == CUDA_SUCCESS) s->ctx->error = rc;
        s->head = j->next;
        if (!s->head) s->tail = NULL;
        s->completed++;
        if (--ke.pending == 0 && ke.inside == 0) ke_maps_bury();
        free(j->deps);
        free(j);
        pthread_cond_broadcast(&ke.done);
    }
    return NULL;
}

int ke_start_thread(void *(*fn)(void *), void *arg) {
    pthread_attr_t a;
    pthread_t thread;
    sigset_t all, old;
    pthread_attr_init(&a);
    pthread_attr_setstacksize(&a, THREAD_STACK);
    pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&thread, &a, fn, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&a);
    return rc;
}

static CUresult start_worker(CUstream s) {
    s->started = ke_start_thread(work, s) == 0;
    return s->started ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* ---- order ------------------------------------------------------------------------------------- */

/* Gets implied dependencies: the legacy default stream waits for all blocking streams of its context, and they for it. */
static size_t implied_deps(CUstream s, struct ke_dep *out) {
    size_t n = 0;
    CUstream null = s->ctx->null_stream;
    if (s->flags & CU_STREAM_NON_BLOCKING) return 0;
    for (CUstream o = ke.streams; o; o = o->next) {
        bool related = s == null ? o->alive && o->ctx == s->ctx && !(o->flags & CU_STREAM_NON_BLOCKING)
                                 : o == null;
        if (!related || o == s || o->completed >= o->submitted) continue;
        if (out) out[n] = (struct ke_dep){o, o->submitted};
        n++;
    }
    return n;
}

static CUresult enqueue(CUstream s, ke_job_fn fn, const void *arg, size_t size, unsigned flags,
                        const struct ke_dep *extra) {
    struct ke_job *j = malloc(sizeof *j + size);
    if (!j) return CUDA_ERROR_OUT_OF_MEMORY;
    *j = (struct ke_job){.fn = fn, .flags = flags};
    if (size) memcpy(j->arg, arg, size);
    size_t n = implied_deps(s, NULL) + (extra != NULL);
    CUresult rc = CUDA_SUCCESS;
    if (n) {
        j->deps = calloc(n, sizeof *j->deps);
        if (j->deps) j->dep_count = implied_deps(s, j->deps);
        else rc = CUDA_ERROR_OUT_OF_MEMORY;
        if (j->deps && extra) j->deps[j->dep_count++] = *extra;
    }
    if (rc == CUDA_SUCCESS && !s->started) rc = start_worker(s);
    if (rc != CUDA_SUCCESS) {
        free(j->deps);
        free(j);
        return rc;
    }
    if (s->tail) s->tail->next = j;
    else s->head = j;
    s->tail = j;
    s->submitted++;
    ke.pending++;
    pthread_cond_signal(&s->more);
    return CUDA_SUCCESS;
}

CUresult ke_submit(CUstream s, ke_job_fn fn, const void *arg, size_t size, unsigned flags) {
    struct ke_work work = ke_work(fn, arg, size, flags);
    bool captured = false;
    ke_mu_lock();
    CUresult rc = s->ctx->error ? s->ctx->error : ke_capture_work(s, &work, &captured);
    if (rc == CUDA_SUCCESS && !captured) rc = enqueue(s, fn, arg, size, flags, NULL);
    ke_mu_unlock();
    return rc;
}

CUresult ke_submit_after(CUstream s, struct ke_dep dep) {
    ke_mu_lock();
    CUresult rc = dep.stream->completed >= dep.seq ? CUDA_SUCCESS : enqueue(s, NULL, NULL, 0, 0, &dep);
    ke_mu_unlock();
    return rc;
}

static void wait_for(struct ke_dep d) { /* ke.mu held */
    while (d.stream->completed < d.seq) pthread_cond_wait(&ke.done, &ke.mu);
}

CUresult ke_wait_stream(CUstream s) {
    ke_mu_lock();
    size_t n = implied_deps(s, NULL);
    struct ke_dep *deps = s == s->ctx->null_stream && n ? calloc(n, sizeof *deps) : NULL;
    n = deps ? implied_deps(s, deps) : 0;
    wait_for((struct ke_dep){s, s->submitted});
    for (size_t i = 0; i < n; i++) wait_for(deps[i]);
    CUresult rc = s->ctx->error;
    ke_mu_unlock();
    free(deps);
    return rc;
}

CUresult ke_wait_default(CUcontext ctx) { return ke_wait_stream(ctx->null_stream); }

void ke_wait_context(CUcontext ctx) {
    ke_mu_lock();
    for (CUstream s = ke.streams; s; s = s->next) {
        if (!ctx || s->ctx == ctx || s->ctx->green_of == ctx) wait_for((struct ke_dep){s, s->submitted});
    }
    ke_mu_unlock();
}

/* ---- handles ----------------------------------------------------------------------------------- */

/* Makes a stream. Structs are reused but never freed: a (stream, sequence) pair stays meaningful for ever. */
CUresult ke_stream_new(CUcontext ctx, unsigned flags, int priority, CUstream *out) {
    CUstream s = ke.streams;
    while (s && (s->alive || s->head)) s = s->next;
    if (!s) {
        s = calloc(1, sizeof *s);
        if (!s) return CUDA_ERROR_OUT_OF_MEMORY;
        pthread_cond_init(&s->more, NULL);
        s->next = ke.streams;
        ke.streams = s;
    }
    s->alive = true;
    s->ctx = ctx;
    s->flags = flags;
    s->copied_in = s->copied_out = false;
    s->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    s->id = ++ke.next_id;
    *out = s;
    return CUDA_SUCCESS;
}

static void give_up(CUstream s) { /* ke.mu held */
    s->alive = false;
    ke_charge(ke.state, ke.slot, ke.devices[s->ctx->dev].gpu, 0, -(int64_t)s->cost);
    s->cost = 0;
}

void ke_streams_end(CUcontext ctx) {
    for (CUstream s = ke.streams; s; s = s->next) {
        if (s->ctx != ctx) continue;
        give_up(s);
        ke_capture_forget_stream(s);
    }
}

static CUresult thread_stream(CUcontext ctx, CUstream *out) {
    CUresult rc = CUDA_SUCCESS;
    ke_mu_lock();
    if (!per_thread || !per_thread->alive || per_thread->ctx != ctx)
        rc = ke_stream_new(ctx, 0, 0, &per_thread);
    ke_mu_unlock();
    *out = per_thread;
    return rc;
}

CUresult ke_stream_resolve(CUstream handle, CUstream *out) {
    CUcontext ctx;
    if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        CUresult rc = ke_current(&ctx);
        if (rc != CUDA_SUCCESS) return rc;
        *out = ctx->null_stream;
        return handle == CU_STREAM_PER_THREAD ? thread_stream(ctx, out) : CUDA_SUCCESS;
    }
    ke_mu_lock();
    CUstream s = ke.streams;
    while (s && s != handle) s = s->next;
    CUresult rc = !s || !s->alive ? CUDA_ERROR_INVALID_HANDLE : s->ctx->alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
    ke_mu_unlock();
    *out = s;
    return rc;
}

static CUresult charge(CUstream s) { /* ke.mu held */
    uint64_t bytes = ke_has(KE_STREAMS_COST) ? ke.state->stream_bytes : 0;
    if (ke_charge(ke.state, ke.slot, ke.devices[s->ctx->dev].gpu, 0, (int64_t)bytes) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    s->cost += bytes;
    return CUDA_SUCCESS;
}

CUresult ke_stream_copies(CUstream s, bool in) {
    bool *copied = in ? &s->copied_in : &s->copied_out;
    ke_mu_lock();
    CUresult rc = *copied || !s->cost ? CUDA_SUCCESS : charge(s);
    *copied = *copied || rc == CUDA_SUCCESS;
    ke_mu_unlock();
    return rc;
}

static CUresult create(CUstream *out, unsigned flags, int priority) {
    CUcontext ctx;
    if (!out || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = ke_current(&ctx);
    if (rc != CUDA_SUCCESS) return rc;
    ke_mu_lock();
    rc = ke_stream_new(ctx, flags, priority, out);
    if (rc == CUDA_SUCCESS) {
        rc = charge(*out);
        if (rc != CUDA_SUCCESS) (*out)->alive = false;
    }
    ke_mu_unlock();
    return rc;
}
KE_FORWARD(cuStreamCreate, (CUstream *phStream, unsigned Flags), create(phStream, Flags, 0))
KE_FORWARD(cuStreamCreateWithPriority, (CUstream *phStream, unsigned flags, int priority),
           create(phStream, flags, priority))

/* Destroys a stream. Work already submitted still runs, as with the real driver. */
KE_ENTRY(cuStreamDestroy_v2, (CUstream handle), (handle)) {
    CUstream s;
    if ((uintptr_t)handle <= 2) return CUDA_ERROR_INVALID_HANDLE;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc != CUDA_SUCCESS && rc != CUDA_ERROR_CONTEXT_IS_DESTROYED) return rc;
    ke_mu_lock();
    give_up(s);
    ke_capture_forget_stream(s);
    ke_mu_unlock();
    return rc;
}

static CUresult synchronize(CUstream handle) {
    CUstream s;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc == CUDA_SUCCESS) rc = ke_capture_touch_stream(s);
    return rc == CUDA_SUCCESS ? ke_wait_stream(s) : rc;
}
KE_API CUresult cuStreamSynchronize(CUstream hStream) {
    KE_CALL_UNHELD(KE_SYNC_CRASHES, synchronize(hStream));
}

static CUresult query(CUstream handle) {
    CUstream s;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc == CUDA_SUCCESS) rc = ke_capture_touch_stream(s);
    if (rc != CUDA_SUCCESS) return rc;
    ke_mu_lock();
    rc = s->completed < s->submitted || (s == s->ctx->null_stream && implied_deps(s, NULL))
             ? CUDA_ERROR_NOT_READY
             : s->ctx->error;
    ke_mu_unlock();
    return rc;
}
KE_API CUresult cuStreamQuery(CUstream hStream) { KE_CALL_UNHELD(KE_QUERY_CRASHES, query(hStream)); }

/* ---- host functions ------------------------------------------------------------------------------ */

struct callback {
    CUhostFn fn;
    CUstreamCallback with_status;
    CUstream handle;
    void *data;
};

static CUresult run_callback(CUcontext ctx, void *arg) {
    struct callback *c = arg;
    ke_in_callback = true;
    if (c->fn) c->fn(c->data);
    else c->with_status(c->handle, ctx->error, c->data);
    ke_in_callback = false;
    return CUDA_SUCCESS;
}

struct ke_work ke_host_work(CUhostFn fn, void *data) {
    struct callback c = {.fn = fn, .data = data};
    return ke_work(run_callback, &c, sizeof c, KE_JOB_NODE(CU_GRAPH_NODE_TYPE_HOST));
}

static CUresult host_function(CUstream handle, struct callback c) {
    CUstream s;
    if (!c.fn && !c.with_status) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc == CUDA_SUCCESS && c.with_status) rc = ke_capture_refuse(s, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (rc != CUDA_SUCCESS) return rc;
    return ke_submit(s, run_callback, &c, sizeof c, KE_JOB_NODE(CU_GRAPH_NODE_TYPE_HOST));
}
KE_API CUresult cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData) {
    KE_CALL(host_function(hStream, (struct callback){.fn = fn, .data = userData}));
}
KE_API CUresult cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData,
                                    unsigned int flags) {
    (void)flags;
    KE_CALL(host_function(hStream, (struct callback){NULL, callback, hStream, userData}));
}

/* ---- queries ------------------------------------------------------------------------------------- */

enum question { Q_PRIORITY, Q_FLAGS, Q_DEVICE, Q_ID, Q_CTX };

static CUresult ask(CUstream handle, enum question q, void *out) {
    CUstream s;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc != CUDA_SUCCESS) return rc;
    switch (q) {
    case Q_PRIORITY: *(int *)out = s->priority; break;
    case Q_FLAGS: *(unsigned *)out = s->flags; break;
    case Q_DEVICE: *(CUdevice *)out = (CUdevice)s->ctx->dev; break;
    case Q_ID: *(unsigned long long *)out = s->id; break;
    case Q_CTX: *(CUcontext *)out = s->ctx; break;
    }
    return CUDA_SUCCESS;
}
KE_FORWARD(cuStreamGetPriority, (CUstream hStream, int *priority), ask(hStream, Q_PRIORITY, priority))
KE_FORWARD(cuStreamGetFlags, (CUstream hStream, unsigned *flags), ask(hStream, Q_FLAGS, flags))
KE_FORWARD(cuStreamGetDevice, (CUstream hStream, CUdevice *device), ask(hStream, Q_DEVICE, device))
KE_FORWARD(cuStreamGetId, (CUstream hStream, unsigned long long *streamId), ask(hStream, Q_ID, streamId))
KE_FORWARD(cuStreamGetCtx, (CUstream hStream, CUcontext *pctx), ask(hStream, Q_CTX, pctx))
KE_API CUresult cuStreamGetCtx_v2(CUstream hStream, CUcontext *pCtx, CUgreenCtx *pGreenCtx) {
    if (pGreenCtx) *pGreenCtx = NULL;
    KE_CALL(ask(hStream, Q_CTX, pCtx));
}
