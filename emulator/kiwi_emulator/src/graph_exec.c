/* Executable graphs: a list of jobs in an order that the edges allow, run as one job of a stream. */
#include <stdlib.h>
#include <string.h>

#include "graph.h"

struct program { /* never changes; launches under way hold a reference */
    unsigned refs;
    unsigned flags; /* KE_JOB_KERNEL if any job is a kernel */
    CUgraph graph;  /* a copy, for comparing updates and for launches into captures */
    size_t count;
    struct ke_work work[];
};

struct CUgraphExec_st {
    CUgraphExec next;
    struct program *program;
    uint64_t flags;
    struct ke_dep last; /* the launch before, on any stream: the next one runs after it */
};
static CUgraphExec execs;

static CUgraphExec find(CUgraphExec handle) {
    CUgraphExec e = execs;
    while (e && e != handle) e = e->next;
    return e;
}

static void unref(struct program *p) {
    if (!p || --p->refs) return;
    ke_graph_free(p->graph);
    free(p);
}

/* ---- the order ----------------------------------------------------------------------------------- */

static size_t jobs_in(CUgraph g) {
    size_t n = 0;
    for (CUgraphNode o = g->first; o; o = o->next) n += o->child ? jobs_in(o->child) : o->work.fn != NULL;
    return n;
}

static bool may_come(CUgraphNode n) {
    for (size_t i = 0; i < n->deps.count; i++) {
        if (!n->deps.at[i]->placed) return false;
    }
    return !n->placed;
}

/* Puts the jobs in order. Returns false if there is a cycle. */
static bool place(CUgraph g, struct program *p) {
    size_t placed = 0, before;
    for (CUgraphNode n = g->first; n; n = n->next) n->placed = false;
    do {
        before = placed;
        for (CUgraphNode n = g->first; n; n = n->next) {
            if (!may_come(n)) continue;
            if (n->child && !place(n->child, p)) return false;
            if (n->work.fn) p->work[p->count++] = n->work;
            if (n->work.fn) p->flags |= n->work.flags & KE_JOB_KERNEL;
            n->placed = true;
            placed++;
        }
    } while (placed != before);
    return placed == g->count;
}

static CUresult compile(CUgraph g, struct program **out) {
    struct program *p = malloc(sizeof *p + jobs_in(g) * sizeof p->work[0]);
    if (!p) return CUDA_ERROR_OUT_OF_MEMORY;
    *p = (struct program){.refs = 1};
    CUresult rc = place(g, p) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (rc == CUDA_SUCCESS && !(p->graph = ke_graph_clone(g))) rc = CUDA_ERROR_OUT_OF_MEMORY;
    if (rc != CUDA_SUCCESS) {
        free(p);
        return rc;
    }
    p->graph->embedded = true;
    *out = p;
    return rc;
}

/* ---- making and ending --------------------------------------------------------------------------- */

static CUresult instantiate(CUgraphExec *out, CUgraph handle, uint64_t flags) {
    CUgraphExec e = calloc(1, sizeof *e);
    CUresult rc = e && out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) rc = CUDA_ERROR_NOT_SUPPORTED;
    ke_mu_lock();
    CUgraph g = ke_graph_find(handle);
    if (rc == CUDA_SUCCESS && !g) rc = CUDA_ERROR_INVALID_VALUE;
    if (rc == CUDA_SUCCESS) rc = compile(g, &e->program);
    if (rc == CUDA_SUCCESS) {
        e->flags = flags;
        e->next = execs;
        execs = *out = e;
    } else {
        free(e);
    }
    ke_mu_unlock();
    return rc;
}
KE_FORWARD(cuGraphInstantiateWithFlags, (CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags),
           instantiate(phGraphExec, hGraph, flags))

KE_ENTRY(cuGraphInstantiateWithParams, (CUgraphExec *out, CUgraph g, CUDA_GRAPH_INSTANTIATE_PARAMS *params),
         (out, g, params)) {
    if (!params) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = instantiate(out, g, params->flags);
    params->hErrNode_out = NULL;
    params->result_out = rc == CUDA_SUCCESS               ? CUDA_GRAPH_INSTANTIATE_SUCCESS
                         : rc == CUDA_ERROR_INVALID_VALUE ? CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE
                                                          : CUDA_GRAPH_INSTANTIATE_ERROR;
    return rc;
}

KE_ENTRY(cuGraphExecDestroy, (CUgraphExec handle), (handle)) {
    ke_mu_lock();
    CUgraphExec *at = &execs;
    while (*at && *at != handle) at = &(*at)->next;
    CUgraphExec e = *at;
    if (e) {
        *at = e->next;
        unref(e->program);
        free(e);
    }
    ke_mu_unlock();
    return e ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

KE_ENTRY(cuGraphExecGetFlags, (CUgraphExec handle, cuuint64_t *flags), (handle, flags)) {
    ke_mu_lock();
    CUgraphExec e = find(handle);
    if (e && flags) *flags = e->flags;
    ke_mu_unlock();
    return e && flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- launches ------------------------------------------------------------------------------------ */

static CUresult run(CUcontext ctx, void *arg) {
    struct program *p = *(struct program **)arg;
    CUresult rc = CUDA_SUCCESS;
    for (size_t i = 0; i < p->count && rc == CUDA_SUCCESS; i++) rc = p->work[i].fn(ctx, p->work[i].arg);
    ke_mu_lock();
    unref(p);
    ke_mu_unlock();
    ke_user_objects_bury();
    return rc;
}

CUresult ke_node_of_launch(CUgraph g, CUgraph what, struct ke_nodes deps, CUgraphNode *out) {
    struct ke_work work = {.flags = KE_JOB_NODE(CU_GRAPH_NODE_TYPE_GRAPH)};
    CUgraph copy = ke_graph_clone(what);
    CUgraphNode n = copy ? ke_node_new(g, &work, deps) : NULL;
    if (copy) copy->embedded = true;
    if (n) n->child = copy;
    else if (copy) ke_graph_free(copy);
    if (n && out) *out = n;
    return n ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

KE_ENTRY(cuGraphLaunch, (CUgraphExec handle, CUstream stream), (handle, stream)) {
    CUstream s;
    CUresult rc = ke_stream_resolve(stream, &s);
    if (rc == CUDA_SUCCESS) rc = ke_capture_refuse(s, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (rc != CUDA_SUCCESS) return rc;
    ke_mu_lock();
    CUgraphExec e = find(handle);
    struct program *p = e ? e->program : NULL;
    rc = e ? ke_capture_implicit(s, true) : CUDA_ERROR_INVALID_VALUE;
    struct ke_dep last = e ? e->last : (struct ke_dep){0};
    if (p) p->refs++;
    ke_mu_unlock();
    if (rc == CUDA_SUCCESS && last.stream) rc = ke_submit_after(s, last);
    if (rc == CUDA_SUCCESS) rc = ke_submit(s, run, &p, sizeof p, p->flags);
    ke_mu_lock();
    if (rc != CUDA_SUCCESS) unref(p);
    else if ((e = find(handle))) e->last = (struct ke_dep){s, s->submitted};
    ke_mu_unlock();
    return rc;
}

KE_ENTRY(cuGraphUpload, (CUgraphExec handle, CUstream stream), (handle, stream)) { /* there is nothing to upload */
    CUstream s;
    CUresult rc = ke_stream_resolve(stream, &s);
    ke_mu_lock();
    if (rc == CUDA_SUCCESS && !find(handle)) rc = CUDA_ERROR_INVALID_VALUE;
    ke_mu_unlock();
    return rc;
}

/* ---- updates ------------------------------------------------------------------------------------- */

static size_t place_of(CUgraph g, CUgraphNode n) {
    size_t i = 0;
    for (CUgraphNode o = g->first; o != n; o = o->next) i++;
    return i;
}

/* Returns what keeps `to` from replacing `from`, and gets the node. */
static CUgraphExecUpdateResult differ(CUgraph from, CUgraph to, CUgraphNode *where) {
    if (from->count != to->count) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    CUgraphNode a = from->first;
    for (CUgraphNode b = to->first; b; a = a->next, b = b->next) {
        *where = b;
        if (KE_JOB_TYPE(a->work.flags) != KE_JOB_TYPE(b->work.flags))
            return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
        if (a->deps.count != b->deps.count) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        for (size_t i = 0; i < a->deps.count; i++) {
            if (place_of(from, a->deps.at[i]) != place_of(to, b->deps.at[i]))
                return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        }
        CUgraphExecUpdateResult inside = a->child ? differ(a->child, b->child, where)
                                                  : CU_GRAPH_EXEC_UPDATE_SUCCESS;
        if (inside != CU_GRAPH_EXEC_UPDATE_SUCCESS) return inside;
    }
    *where = NULL;
    return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

static CUresult replace(CUgraphExec e, CUgraph g) {
    struct program *p = NULL;
    CUresult rc = compile(g, &p);
    if (rc != CUDA_SUCCESS) return rc;
    unref(e->program);
    e->program = p;
    return rc;
}

KE_ENTRY(cuGraphExecUpdate_v2, (CUgraphExec handle, CUgraph graph, CUgraphExecUpdateResultInfo *info),
         (handle, graph, info)) {
    if (!info) return CUDA_ERROR_INVALID_VALUE;
    *info = (CUgraphExecUpdateResultInfo){.result = CU_GRAPH_EXEC_UPDATE_ERROR};
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    CUgraphExec e = find(handle);
    CUgraph g = ke_graph_find(graph);
    if (e && g) {
        info->result = differ(e->program->graph, g, &info->errorNode);
        rc = info->result == CU_GRAPH_EXEC_UPDATE_SUCCESS ? replace(e, g) : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    }
    ke_mu_unlock();
    return rc;
}
