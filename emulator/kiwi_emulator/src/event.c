/* Events: a place in the order of a stream, and the time when the stream reached it. */
#include <stdlib.h>

#include "emu.h"

#define MAGIC 0xE7E00001u

static CUevent free_events; /* structs are reused, never freed: stale handles get an error */

static CUresult check(CUevent e) {
    return e && e->magic == MAGIC && e->alive ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static void unref(CUevent e) { /* ke.mu held */
    if (--e->refs) return;
    e->next_free = free_events;
    free_events = e;
}

KE_ENTRY(cuEventCreate, (CUevent *out, unsigned flags), (out, flags)) {
    CUcontext ctx;
    if (!out || flags > 7) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = ke_current(&ctx);
    if (rc != CUDA_SUCCESS) return rc;
    ke_mu_lock();
    CUevent e = free_events;
    if (e) free_events = e->next_free;
    else e = calloc(1, sizeof *e);
    if (e) {
        uint64_t generation = e->generation + 1;
        *e = (struct CUevent_st){.magic = MAGIC, .alive = true, .ctx = ctx, .flags = flags, .refs = 1,
                                 .generation = generation};
        *out = e;
    }
    ke_mu_unlock();
    return e ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

KE_ENTRY(cuEventDestroy_v2, (CUevent e), (e)) {
    ke_mu_lock();
    CUresult rc = check(e);
    if (rc == CUDA_SUCCESS) {
        e->alive = false;
        ke_capture_forget_event(e);
        unref(e);
    }
    ke_mu_unlock();
    return rc;
}

struct stamp {
    CUevent event;
    uint64_t generation;
};

static CUresult reached(CUcontext ctx, void *arg) {
    (void)ctx;
    struct stamp *s = arg;
    ke_mu_lock();
    if (s->event->generation == s->generation) s->event->time_ns = ke_now_ns();
    unref(s->event);
    ke_mu_unlock();
    return CUDA_SUCCESS;
}

static CUresult record(CUevent e, CUstream handle, unsigned flags) {
    CUstream s;
    bool captured = false;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc != CUDA_SUCCESS) return rc;
    ke_mu_lock();
    rc = check(e);
    if (rc == CUDA_SUCCESS && e->ctx != s->ctx) rc = CUDA_ERROR_INVALID_HANDLE;
    struct stamp stamp = {e, 0};
    if (rc == CUDA_SUCCESS && s->capture && flags) rc = CUDA_ERROR_NOT_SUPPORTED; /* would be a node of its own */
    if (rc == CUDA_SUCCESS) rc = ke_capture_record(e, s, &captured);
    if (rc == CUDA_SUCCESS && !captured) {
        ke_capture_forget_event(e);
        stamp.generation = ++e->generation;
        e->time_ns = 0;
        e->refs++;
    }
    ke_mu_unlock();
    if (rc != CUDA_SUCCESS || captured) return rc;
    rc = ke_submit(s, reached, &stamp, sizeof stamp, 0);
    ke_mu_lock();
    if (rc == CUDA_SUCCESS) {
        e->recorded = true;
        e->at = (struct ke_dep){s, s->submitted};
    } else {
        unref(e);
    }
    ke_mu_unlock();
    return rc;
}
KE_FORWARD(cuEventRecord, (CUevent hEvent, CUstream hStream), record(hEvent, hStream, 0))
KE_FORWARD(cuEventRecordWithFlags, (CUevent hEvent, CUstream hStream, unsigned flags), record(hEvent, hStream, flags))

static CUresult query(CUevent e) {
    ke_mu_lock();
    CUresult rc = check(e);
    if (rc == CUDA_SUCCESS) rc = ke_capture_touch_event(e);
    if (rc == CUDA_SUCCESS && e->recorded && e->at.stream->completed < e->at.seq)
        rc = CUDA_ERROR_NOT_READY;
    ke_mu_unlock();
    return rc == CUDA_SUCCESS ? e->ctx->error : rc;
}
KE_API CUresult cuEventQuery(CUevent hEvent) { KE_CALL_UNHELD(KE_QUERY_CRASHES, query(hEvent)); }

static CUresult synchronize(CUevent e) {
    ke_mu_lock();
    CUresult rc = check(e);
    if (rc == CUDA_SUCCESS) rc = ke_capture_touch_event(e);
    if (rc == CUDA_SUCCESS && e->recorded) {
        struct ke_dep at = e->at;
        while (at.stream->completed < at.seq) pthread_cond_wait(&ke.done, &ke.mu);
    }
    ke_mu_unlock();
    return rc == CUDA_SUCCESS ? e->ctx->error : rc;
}
KE_API CUresult cuEventSynchronize(CUevent hEvent) {
    KE_CALL_UNHELD(KE_QUERY_CRASHES, synchronize(hEvent));
}

KE_ENTRY(cuEventElapsedTime_v2, (float *ms, CUevent a, CUevent b), (ms, a, b)) {
    if (!ms) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    CUresult rc = check(a) ? check(a) : check(b);
    if (rc == CUDA_SUCCESS && (a->capture_id || b->capture_id)) rc = CUDA_ERROR_CAPTURED_EVENT;
    if (rc == CUDA_SUCCESS && (!a->recorded || !b->recorded)) rc = CUDA_ERROR_INVALID_HANDLE;
    if (rc == CUDA_SUCCESS && ((a->flags | b->flags) & CU_EVENT_DISABLE_TIMING))
        rc = CUDA_ERROR_INVALID_HANDLE;
    if (rc == CUDA_SUCCESS && (!a->time_ns || !b->time_ns)) rc = CUDA_ERROR_NOT_READY;
    if (rc == CUDA_SUCCESS) *ms = (float)((double)(int64_t)(b->time_ns - a->time_ns) / 1e6);
    ke_mu_unlock();
    return rc;
}

KE_ENTRY(cuStreamWaitEvent, (CUstream handle, CUevent e, unsigned flags), (handle, e, flags)) {
    (void)flags;
    CUstream s;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc != CUDA_SUCCESS) return rc;
    ke_mu_lock();
    rc = check(e);
    bool captured = false;
    if (rc == CUDA_SUCCESS) rc = ke_capture_wait(s, e, &captured);
    bool recorded = rc == CUDA_SUCCESS && !captured && e->recorded;
    struct ke_dep at = {0};
    if (recorded) at = e->at;
    ke_mu_unlock();
    return recorded ? ke_submit_after(s, at) : rc;
}
