/* Stream capture: work that is submitted to a capturing stream becomes nodes of a graph.
 *
 * Written from the comments in cuda.h and from the programming guide's chapter on graphs. Where they only say
 * that an operation is invalid, this file chooses the error, and invalidates the capture.
 */
#include <stdlib.h>

#include "graph.h"

static struct ke_capture *captures;

static __thread CUstreamCaptureMode thread_mode; /* initially global */
static __thread uint64_t this_thread;

static uint64_t me(void) {
    static uint64_t threads;
    if (!this_thread) this_thread = __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
    return this_thread;
}

/* ---- what captures forbid (ke.mu held, unless a comment says otherwise) -------------------------- */

static bool forbids(const struct ke_capture *c) { /* returns whether c forbids an unsafe call of this thread */
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    if (c->thread == me()) return c->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    return thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

static CUresult unsafe(void) {
    CUresult rc = CUDA_SUCCESS;
    for (struct ke_capture *c = captures; c; c = c->next) {
        if (!forbids(c)) continue;
        c->invalid = true;
        rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return rc;
}

CUresult ke_capture_unsafe(void) { /* takes ke.mu */
    ke_mu_lock();
    CUresult rc = unsafe();
    ke_mu_unlock();
    return rc;
}

/* Returns an error if s is the legacy stream, and would have to wait for a blocking stream that captures. */
CUresult ke_capture_implicit(CUstream s, bool spoil) {
    CUresult rc = CUDA_SUCCESS;
    if (s != s->ctx->null_stream) return rc;
    for (CUstream o = ke.streams; o; o = o->next) {
        if (!o->capture || o->ctx != s->ctx || (o->flags & CU_STREAM_NON_BLOCKING)) continue;
        if (spoil) o->capture->invalid = true;
        rc = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    return rc;
}

CUresult ke_capture_touch_stream(CUstream s) { /* takes ke.mu */
    ke_mu_lock();
    CUresult rc = ke_capture_implicit(s, true);
    if (s->capture) {
        s->capture->invalid = true;
        rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (rc == CUDA_SUCCESS) rc = unsafe();
    ke_mu_unlock();
    return rc;
}

CUresult ke_capture_touch_context(CUcontext ctx) { /* takes ke.mu */
    ke_mu_lock();
    CUresult rc = unsafe();
    for (CUstream s = ke.streams; s; s = s->next) {
        if (!s->capture || s->ctx != ctx) continue;
        s->capture->invalid = true;
        rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    ke_mu_unlock();
    return rc;
}

bool ke_capturing(CUstream s) { /* takes ke.mu */
    ke_mu_lock();
    bool yes = s->capture != NULL;
    ke_mu_unlock();
    return yes;
}

/* Refuses work that cannot become a node. */
CUresult ke_capture_refuse(CUstream s, CUresult why) { /* takes ke.mu */
    ke_mu_lock();
    bool yes = s->capture != NULL;
    if (yes) s->capture->invalid = true;
    ke_mu_unlock();
    return yes ? why : CUDA_SUCCESS;
}

/* ---- work ---------------------------------------------------------------------------------------- */

static void follow(CUstream s, CUgraphNode n) { /* the next node depends on n alone */
    s->after.count = 0;
    if (!ke_nodes_add(&s->after, n)) s->capture->invalid = true;
}

/* Gets whether the stream takes part in a capture; returns the error if the capture cannot go on. */
static CUresult begins(CUstream s, bool *captured) {
    *captured = s->capture != NULL;
    if (!s->capture) return ke_capture_implicit(s, true);
    return s->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

CUresult ke_capture_work(CUstream s, const struct ke_work *work, bool *captured) {
    CUresult rc = begins(s, captured);
    if (rc != CUDA_SUCCESS || !*captured) return rc;
    CUgraphNode n = ke_node_new(s->capture->graph, work, s->after);
    if (n) follow(s, n);
    return n ? rc : CUDA_ERROR_OUT_OF_MEMORY;
}

/* ---- events -------------------------------------------------------------------------------------- */

static struct ke_capture *capture_of(CUevent e) { /* NULL: e was recorded in no open capture */
    struct ke_capture *c = captures;
    while (c && c->id != e->capture_id) c = c->next;
    return c;
}

void ke_capture_forget_event(CUevent e) {
    e->capture_id = 0;
    ke_nodes_clear(&e->captured);
}

CUresult ke_capture_record(CUevent e, CUstream s, bool *captured) {
    CUresult rc = begins(s, captured);
    if (rc != CUDA_SUCCESS || !*captured) return rc;
    ke_capture_forget_event(e);
    for (size_t i = 0; i < s->after.count; i++) {
        if (!ke_nodes_add(&e->captured, s->after.at[i])) return CUDA_ERROR_OUT_OF_MEMORY;
    }
    e->capture_id = s->capture->id;
    return CUDA_SUCCESS;
}

static CUresult spoil(struct ke_capture *a, struct ke_capture *b, CUresult why) {
    if (a) a->invalid = true;
    if (b) b->invalid = true;
    return why;
}

CUresult ke_capture_wait(CUstream s, CUevent e, bool *captured) {
    struct ke_capture *c = e->capture_id ? capture_of(e) : NULL;
    CUresult rc = begins(s, captured);
    if (rc != CUDA_SUCCESS) return rc;
    if (!e->capture_id) /* an event outside of captures may only pass if it was never recorded */
        return s->capture && e->recorded ? spoil(s->capture, NULL, CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
                                         : CUDA_SUCCESS;
    *captured = true;
    if (!c) return spoil(s->capture, NULL, CUDA_ERROR_CAPTURED_EVENT);
    if (c->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (s == s->ctx->null_stream) return spoil(c, NULL, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (s->capture && s->capture != c) return spoil(c, s->capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    s->capture = c;
    for (size_t i = 0; i < e->captured.count; i++) {
        if (!ke_nodes_add(&s->after, e->captured.at[i])) return spoil(c, NULL, CUDA_ERROR_OUT_OF_MEMORY);
    }
    return CUDA_SUCCESS;
}

CUresult ke_capture_touch_event(CUevent e) {
    if (!e->capture_id) return unsafe();
    return spoil(capture_of(e), NULL, CUDA_ERROR_CAPTURED_EVENT);
}

/* ---- begin and end ------------------------------------------------------------------------------- */

static void leave(CUstream s) {
    s->capture = NULL;
    ke_nodes_clear(&s->after);
}

/* Ends a capture. Freeing the graph frees what was captured into it. */
static void end(struct ke_capture *c, bool keep_graph) {
    struct ke_capture **at = &captures;
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    for (CUstream s = ke.streams; s; s = s->next) {
        if (s->capture == c) leave(s);
    }
    c->graph->capturing = false;
    ke_nodes_clear(&c->loose);
    if (!keep_graph) ke_graph_free(c->graph);
    free(c);
}

void ke_capture_forget_stream(CUstream s) {
    struct ke_capture *c = s->capture;
    if (!c) return;
    for (size_t i = 0; i < s->after.count; i++) {
        if (!ke_nodes_add(&c->loose, s->after.at[i])) c->invalid = true;
    }
    leave(s);
    if (c->origin == s) end(c, false);
}

KE_ENTRY(cuStreamBeginCapture_v2, (CUstream handle, CUstreamCaptureMode mode), (handle, mode)) {
    CUstream s;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc != CUDA_SUCCESS) return rc;
    if ((int)mode < 0 || mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    if (s == s->ctx->null_stream) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    struct ke_capture *c = calloc(1, sizeof *c);
    ke_mu_lock();
    if (s->capture) rc = CUDA_ERROR_ILLEGAL_STATE;
    else if (!c || !(c->graph = ke_graph_new())) rc = CUDA_ERROR_OUT_OF_MEMORY;
    if (rc == CUDA_SUCCESS) {
        *c = (struct ke_capture){captures, c->graph, s, mode, me(), ++ke.next_id, false, {0}};
        c->graph->capturing = true;
        captures = s->capture = c;
    } else {
        free(c);
    }
    ke_mu_unlock();
    return rc;
}

static void mark(const struct ke_nodes *set) { /* marks the nodes, and all that they depend on */
    for (size_t i = 0; i < set->count; i++) {
        if (set->at[i]->placed) continue;
        set->at[i]->placed = true;
        mark(&set->at[i]->deps);
    }
}

static bool marked(const struct ke_nodes *set) {
    for (size_t i = 0; i < set->count; i++) {
        if (!set->at[i]->placed) return false;
    }
    return true;
}

/* Returns whether the origin stream depends on all work of the forked streams. */
static bool joined(struct ke_capture *c) {
    for (CUgraphNode n = c->graph->first; n; n = n->next) n->placed = false;
    mark(&c->origin->after);
    bool all = marked(&c->loose);
    for (CUstream s = ke.streams; s; s = s->next) {
        if (s->capture == c) all = all && marked(&s->after);
    }
    return all;
}

static CUresult finish(CUstream s, CUgraph *graph) {
    struct ke_capture *c = s->capture;
    if (!c) return CUDA_ERROR_ILLEGAL_STATE;
    if (c->origin != s) return spoil(c, NULL, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    if (c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && c->thread != me())
        return spoil(c, NULL, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    CUresult rc = c->invalid    ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                  : !joined(c) ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                               : CUDA_SUCCESS;
    *graph = rc == CUDA_SUCCESS ? c->graph : NULL;
    end(c, rc == CUDA_SUCCESS);
    return rc;
}

KE_ENTRY(cuStreamEndCapture, (CUstream handle, CUgraph *graph), (handle, graph)) {
    CUstream s;
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc != CUDA_SUCCESS) return rc;
    ke_mu_lock();
    rc = finish(s, graph);
    ke_mu_unlock();
    return rc;
}

/* ---- the mode of a thread ------------------------------------------------------------------------ */

KE_ENTRY(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *mode), (mode)) {
    if (!mode || (int)*mode < 0 || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
