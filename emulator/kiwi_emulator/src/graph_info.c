/* Queries about graphs: their nodes and edges, and the type of a node. */
#include <string.h>

#include "graph.h"

/* Counts the answers, and writes as many as there is room for into one or two arrays. */
struct answers {
    CUgraphNode *from, *to;
    size_t room, found;
};

static void answer(struct answers *a, CUgraphNode from, CUgraphNode to) {
    if (a->from && a->found < a->room) {
        a->from[a->found] = from;
        if (a->to) a->to[a->found] = to;
    }
    a->found++;
}

static void finish(struct answers *a, CUgraphEdgeData *edges, size_t *count) {
    for (size_t i = a->found; a->from && i < a->room; i++) {
        a->from[i] = NULL;
        if (a->to) a->to[i] = NULL;
    }
    if (edges && a->from) memset(edges, 0, a->room * sizeof *edges);
    *count = a->from && a->found > a->room ? a->room : a->found;
}

enum what { ALL, ROOTS, EDGES };

static CUresult list(CUgraph handle, enum what what, CUgraphNode *from, CUgraphNode *to,
                     CUgraphEdgeData *edges, size_t *count) {
    if (!count || (what == EDGES && !from != !to)) return CUDA_ERROR_INVALID_VALUE;
    struct answers a = {from, to, *count, 0};
    ke_mu_lock();
    CUgraph g = ke_graph_find(handle);
    for (CUgraphNode n = g ? g->first : NULL; n; n = n->next) {
        if (what == ALL || (what == ROOTS && n->deps.count == 0)) answer(&a, n, NULL);
        for (size_t i = 0; what == EDGES && i < n->deps.count; i++) answer(&a, n->deps.at[i], n);
    }
    ke_mu_unlock();
    if (!g) return CUDA_ERROR_INVALID_VALUE;
    finish(&a, edges, count);
    return CUDA_SUCCESS;
}
KE_FORWARD(cuGraphGetNodes, (CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes),
           list(hGraph, ALL, nodes, NULL, NULL, numNodes))
KE_FORWARD(cuGraphGetRootNodes, (CUgraph hGraph, CUgraphNode *rootNodes, size_t *numRootNodes),
           list(hGraph, ROOTS, rootNodes, NULL, NULL, numRootNodes))
KE_API CUresult cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to,
                                   CUgraphEdgeData *edgeData, size_t *numEdges) {
    KE_CALL(list(hGraph, EDGES, from, to, edgeData, numEdges));
}
KE_FORWARD(cuGraphGetEdges, (CUgraph g, CUgraphNode *from, CUgraphNode *to, size_t *n),
           list(g, EDGES, from, to, NULL, n))

static CUresult neighbours(CUgraphNode handle, bool before, CUgraphNode *out, CUgraphEdgeData *edges,
                           size_t *count) {
    if (!count) return CUDA_ERROR_INVALID_VALUE;
    struct answers a = {out, NULL, *count, 0};
    ke_mu_lock();
    CUgraphNode n = ke_node_find(handle);
    for (size_t i = 0; n && before && i < n->deps.count; i++) answer(&a, n->deps.at[i], NULL);
    for (CUgraphNode o = n && !before ? n->graph->first : NULL; o; o = o->next) {
        if (ke_nodes_hold(&o->deps, n)) answer(&a, o, NULL);
    }
    ke_mu_unlock();
    if (!n) return CUDA_ERROR_INVALID_VALUE;
    finish(&a, edges, count);
    return CUDA_SUCCESS;
}
KE_API CUresult cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode *dependencies,
                                              CUgraphEdgeData *edgeData, size_t *numDependencies) {
    KE_CALL(neighbours(hNode, true, dependencies, edgeData, numDependencies));
}
KE_API CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode hNode, CUgraphNode *dependentNodes,
                                                CUgraphEdgeData *edgeData, size_t *numDependentNodes) {
    KE_CALL(neighbours(hNode, false, dependentNodes, edgeData, numDependentNodes));
}
KE_FORWARD(cuGraphNodeGetDependencies, (CUgraphNode node, CUgraphNode *them, size_t *n),
           neighbours(node, true, them, NULL, n))
KE_FORWARD(cuGraphNodeGetDependentNodes, (CUgraphNode node, CUgraphNode *them, size_t *n),
           neighbours(node, false, them, NULL, n))

KE_ENTRY(cuGraphNodeGetType, (CUgraphNode handle, CUgraphNodeType *type), (handle, type)) {
    ke_mu_lock();
    CUgraphNode n = ke_node_find(handle);
    if (n && type) *type = (CUgraphNodeType)KE_JOB_TYPE(n->work.flags);
    ke_mu_unlock();
    return n && type ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

KE_ENTRY(cuGraphChildGraphNodeGetGraph, (CUgraphNode handle, CUgraph *out), (handle, out)) {
    ke_mu_lock();
    CUgraphNode n = ke_node_find(handle);
    if (n && n->child && out) *out = n->child;
    ke_mu_unlock();
    return n && n->child && out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
