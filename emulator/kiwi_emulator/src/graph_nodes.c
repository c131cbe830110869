/* Adds nodes to graphs: kernels, copies, fills, host functions, empty nodes, child graphs. */
#include "graph.h"

/* ---- copies of boxes, as nodes describe them ------------------------------------------------------ */

struct box {
    CUdeviceptr dst, src;
    size_t dst_pitch, src_pitch, dst_slice, src_slice; /* bytes from row to row, from slice to slice */
    size_t width, height, depth;
};
_Static_assert(sizeof(struct box) <= KE_WORK_BYTES, "a box is a job's argument");

static CUresult run_box(CUcontext ctx, void *arg) {
    (void)ctx;
    const struct box *b = arg;
    CUresult rc = CUDA_SUCCESS;
    for (size_t z = 0; z < b->depth; z++) {
        for (size_t y = 0; y < b->height && rc == CUDA_SUCCESS; y++) {
            rc = ke_move(b->dst + z * b->dst_slice + y * b->dst_pitch,
                         b->src + z * b->src_slice + y * b->src_pitch, b->width);
        }
    }
    return rc;
}

static CUdeviceptr end_of(int type, const void *host, CUdeviceptr device) {
    if (type == CU_MEMORYTYPE_HOST) return (CUdeviceptr)(uintptr_t)host;
    return type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED ? device : 0;
}

static CUresult box_work(const CUDA_MEMCPY3D *p, struct ke_work *work) {
    CUdeviceptr dst = end_of((int)p->dstMemoryType, p->dstHost, p->dstDevice);
    CUdeviceptr src = end_of((int)p->srcMemoryType, p->srcHost, p->srcDevice);
    if (!dst || !src || !p->WidthInBytes || !p->Height || !p->Depth) return CUDA_ERROR_INVALID_VALUE;
    bool rows = p->Height > 1 || p->Depth > 1;
    if (rows && (p->dstPitch < p->WidthInBytes || p->srcPitch < p->WidthInBytes)) return CUDA_ERROR_INVALID_VALUE;
    struct box b = {.dst_pitch = p->dstPitch, .src_pitch = p->srcPitch,
                    .dst_slice = p->dstPitch * p->dstHeight, .src_slice = p->srcPitch * p->srcHeight,
                    .width = p->WidthInBytes, .height = p->Height, .depth = p->Depth};
    b.dst = dst + p->dstXInBytes + p->dstY * b.dst_pitch + p->dstZ * b.dst_slice;
    b.src = src + p->srcXInBytes + p->srcY * b.src_pitch + p->srcZ * b.src_slice;
    *work = ke_work(run_box, &b, sizeof b, KE_JOB_NODE(CU_GRAPH_NODE_TYPE_MEMCPY));
    return CUDA_SUCCESS;
}

/* ---- adding -------------------------------------------------------------------------------------- */

static CUresult add(CUgraphNode *out, CUgraph handle, struct ke_nodes deps, const struct ke_work *work,
                    CUgraph child) {
    if (!out || (deps.count && !deps.at)) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    CUgraph g = ke_graph_find(handle);
    CUresult rc = g ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < deps.count && rc == CUDA_SUCCESS; i++) {
        struct ke_nodes before = {deps.at, i};
        if (!ke_node_in(g, deps.at[i]) || ke_nodes_hold(&before, deps.at[i])) rc = CUDA_ERROR_INVALID_VALUE;
    }
    if (rc == CUDA_SUCCESS && child) {
        rc = ke_graph_find(child) ? ke_node_of_launch(g, child, deps, out) : CUDA_ERROR_INVALID_VALUE;
    } else if (rc == CUDA_SUCCESS) {
        CUgraphNode n = ke_node_new(g, work, deps);
        if (n) *out = n;
        else rc = CUDA_ERROR_OUT_OF_MEMORY;
    }
    ke_mu_unlock();
    return rc;
}

static struct ke_nodes these(const CUgraphNode *at, size_t count) {
    return (struct ke_nodes){(CUgraphNode *)at, count}; /* the set is only read */
}

/* Macros, because the generic call has other structs with the same fields. */
#define KERNEL(p, work)                                                                                 \
    ke_launch_work((p)->func ? (p)->func : (CUfunction)(p)->kern,                                       \
                   (const unsigned[6]){(p)->gridDimX, (p)->gridDimY, (p)->gridDimZ, (p)->blockDimX,     \
                                       (p)->blockDimY, (p)->blockDimZ},                                 \
                   (p)->kernelParams, (p)->extra, work)
#define FILL(p, work) ke_fill_work((p)->dst, (p)->pitch, (p)->value, (p)->elementSize, (p)->width, (p)->height, work)

static CUresult host_work(CUhostFn fn, void *data, struct ke_work *work) {
    if (!fn) return CUDA_ERROR_INVALID_VALUE;
    *work = ke_host_work(fn, data);
    return CUDA_SUCCESS;
}

#define ADD(make)                                                                                     \
    do {                                                                                              \
        struct ke_work work;                                                                          \
        CUresult rc = p ? make : CUDA_ERROR_INVALID_VALUE;                                            \
        return rc == CUDA_SUCCESS ? add(out, g, deps, &work, NULL) : rc;                              \
    } while (0)

static CUresult add_kernel(CUgraphNode *out, CUgraph g, struct ke_nodes deps, const CUDA_KERNEL_NODE_PARAMS *p) {
    ADD(KERNEL(p, &work));
}
static CUresult add_copy(CUgraphNode *out, CUgraph g, struct ke_nodes deps, const CUDA_MEMCPY3D *p) {
    ADD(box_work(p, &work));
}
static CUresult add_fill(CUgraphNode *out, CUgraph g, struct ke_nodes deps, const CUDA_MEMSET_NODE_PARAMS *p) {
    ADD(FILL(p, &work));
}
static CUresult add_host(CUgraphNode *out, CUgraph g, struct ke_nodes deps, const CUDA_HOST_NODE_PARAMS *p) {
    ADD(host_work(p->fn, p->userData, &work));
}
static CUresult add_child(CUgraphNode *out, CUgraph g, struct ke_nodes deps, CUgraph child) {
    return child ? add(out, g, deps, NULL, child) : CUDA_ERROR_INVALID_VALUE;
}
static CUresult add_empty(CUgraphNode *out, CUgraph g, struct ke_nodes deps) {
    struct ke_work work = {.flags = KE_JOB_NODE(CU_GRAPH_NODE_TYPE_EMPTY)};
    return add(out, g, deps, &work, NULL);
}

KE_API CUresult cuGraphAddKernelNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *deps,
                                        size_t n, const CUDA_KERNEL_NODE_PARAMS *params) {
    KE_CALL(add_kernel(phGraphNode, hGraph, these(deps, n), params));
}
KE_API CUresult cuGraphAddMemcpyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *deps,
                                     size_t n, const CUDA_MEMCPY3D *params, CUcontext ctx) {
    (void)ctx;
    KE_CALL(add_copy(phGraphNode, hGraph, these(deps, n), params));
}
KE_API CUresult cuGraphAddMemsetNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *deps,
                                     size_t n, const CUDA_MEMSET_NODE_PARAMS *params, CUcontext ctx) {
    (void)ctx;
    KE_CALL(add_fill(phGraphNode, hGraph, these(deps, n), params));
}
KE_API CUresult cuGraphAddHostNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *deps,
                                   size_t n, const CUDA_HOST_NODE_PARAMS *params) {
    KE_CALL(add_host(phGraphNode, hGraph, these(deps, n), params));
}
KE_FORWARD(cuGraphAddEmptyNode, (CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *deps, size_t n),
           add_empty(phGraphNode, hGraph, these(deps, n)))
KE_API CUresult cuGraphAddChildGraphNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *deps,
                                         size_t n, CUgraph childGraph) {
    KE_CALL(add_child(phGraphNode, hGraph, these(deps, n), childGraph));
}

static CUresult add_any(CUgraphNode *out, CUgraph g, struct ke_nodes deps, const CUgraphNodeParams *p) {
    if (!p) return CUDA_ERROR_INVALID_VALUE;
    switch ((int)p->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: ADD(KERNEL(&p->kernel, &work));
    case CU_GRAPH_NODE_TYPE_MEMCPY: ADD(box_work(&p->memcpy.copyParams, &work));
    case CU_GRAPH_NODE_TYPE_MEMSET: ADD(FILL(&p->memset, &work));
    case CU_GRAPH_NODE_TYPE_HOST: ADD(host_work(p->host.fn, p->host.userData, &work));
    case CU_GRAPH_NODE_TYPE_GRAPH: return add_child(out, g, deps, p->graph.graph);
    case CU_GRAPH_NODE_TYPE_EMPTY: return add_empty(out, g, deps);
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}
KE_API CUresult cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *deps,
                                  const CUgraphEdgeData *dependencyData, size_t n, CUgraphNodeParams *params) {
    (void)dependencyData;
    KE_CALL(add_any(phGraphNode, hGraph, these(deps, n), params));
}
KE_FORWARD(cuGraphAddNode,
           (CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t n, CUgraphNodeParams *params),
           add_any(out, g, these(deps, n), params))
