/* Queries about captures, and the dependencies of a capture's next node. */
#include <stdlib.h>

#include "graph.h"

/* Makes an array of edges without data: no edge here has any. */
static CUresult edges_of(CUstream s, const CUgraphEdgeData **out) {
    free(s->edges);
    s->edges = calloc(s->after.count + 1, sizeof *s->edges);
    *out = s->edges;
    return s->edges ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

struct info {
    CUstreamCaptureStatus *status;
    cuuint64_t *id;
    CUgraph *graph;
    const CUgraphNode **deps;
    const CUgraphEdgeData **edges;
    size_t *count;
};

static CUresult info(CUstream handle, struct info out) {
    CUstream s;
    if (!out.status || (out.edges && !out.deps)) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc != CUDA_SUCCESS) return rc;
    ke_mu_lock();
    struct ke_capture *c = s->capture;
    rc = ke_capture_implicit(s, false);
    *out.status = !c           ? CU_STREAM_CAPTURE_STATUS_NONE
                  : c->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                               : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (out.id) *out.id = c ? c->id : 0;
    if (out.graph) *out.graph = c ? c->graph : NULL;
    if (out.deps) *out.deps = s->after.at;
    if (out.edges && rc == CUDA_SUCCESS) rc = edges_of(s, out.edges);
    if (out.count) *out.count = s->after.count;
    ke_mu_unlock();
    return rc;
}
KE_API CUresult cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus) {
    KE_CALL(info(hStream, (struct info){.status = captureStatus}));
}
KE_FORWARD(cuStreamGetCaptureInfo, (CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id),
           info(s, (struct info){.status = status, .id = id}))
KE_API CUresult cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                          CUgraph *graph, const CUgraphNode **deps, size_t *count) {
    KE_CALL(info(hStream, (struct info){status, id, graph, deps, NULL, count}));
}
KE_API CUresult cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                          CUgraph *graph, const CUgraphNode **deps,
                                          const CUgraphEdgeData **edges, size_t *count) {
    KE_CALL(info(hStream, (struct info){status, id, graph, deps, edges, count}));
}

KE_ENTRY(cuStreamUpdateCaptureDependencies_v2,
         (CUstream handle, CUgraphNode *nodes, const CUgraphEdgeData *edges, size_t n, unsigned flags),
         (handle, nodes, edges, n, flags)) {
    (void)edges;
    CUstream s;
    if ((n && !nodes) || flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc != CUDA_SUCCESS) return rc;
    ke_mu_lock();
    if (!s->capture) rc = CUDA_ERROR_ILLEGAL_STATE;
    else if (s->capture->invalid) rc = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    for (size_t i = 0; i < n && rc == CUDA_SUCCESS; i++) {
        if (!ke_node_in(s->capture->graph, nodes[i])) rc = CUDA_ERROR_INVALID_VALUE;
    }
    if (rc == CUDA_SUCCESS && flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) s->after.count = 0;
    for (size_t i = 0; i < n && rc == CUDA_SUCCESS; i++) {
        if (!ke_nodes_add(&s->after, nodes[i])) rc = CUDA_ERROR_OUT_OF_MEMORY;
    }
    ke_mu_unlock();
    return rc;
}
KE_FORWARD(cuStreamUpdateCaptureDependencies, (CUstream s, CUgraphNode *nodes, size_t n, unsigned flags),
           in_cuStreamUpdateCaptureDependencies_v2(s, nodes, NULL, n, flags))
