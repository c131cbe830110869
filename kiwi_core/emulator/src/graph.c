/* Graphs and their nodes: making, copying, joining and looking at them.  Handles are known by being in
 * the list, so that a stale one gets an answer. */
#include <stdlib.h>
#include <string.h>

#include "graph.h"

static CUgraph graphs;

/* ---- sets of nodes ------------------------------------------------------------------------------- */

bool ke_nodes_hold(const struct ke_nodes *set, CUgraphNode n) {
    for (size_t i = 0; i < set->count; i++) {
        if (set->at[i] == n) return true;
    }
    return false;
}

bool ke_nodes_add(struct ke_nodes *set, CUgraphNode n) {
    if (ke_nodes_hold(set, n)) return true;
    CUgraphNode *bigger = realloc(set->at, (set->count + 1) * sizeof *bigger);
    if (!bigger) return false;
    set->at = bigger;
    set->at[set->count++] = n;
    return true;
}

static void take_out(struct ke_nodes *set, CUgraphNode n) {
    size_t kept = 0;
    for (size_t i = 0; i < set->count; i++) {
        if (set->at[i] != n) set->at[kept++] = set->at[i];
    }
    set->count = kept;
}

void ke_nodes_clear(struct ke_nodes *set) {
    free(set->at);
    *set = (struct ke_nodes){0};
}

/* ---- nodes --------------------------------------------------------------------------------------- */

bool ke_node_in(CUgraph g, CUgraphNode handle) {
    CUgraphNode n = g->first;
    while (n && n != handle) n = n->next;
    return n != NULL;
}

CUgraphNode ke_node_find(CUgraphNode handle) {
    for (CUgraph g = graphs; g; g = g->next) {
        if (ke_node_in(g, handle)) return handle;
    }
    return NULL;
}

CUgraphNode ke_node_new(CUgraph g, const struct ke_work *work, struct ke_nodes deps) {
    CUgraphNode n = calloc(1, sizeof *n);
    bool ok = n != NULL;
    for (size_t i = 0; i < deps.count && ok; i++) ok = ke_nodes_add(&n->deps, deps.at[i]);
    if (!ok) {
        if (n) ke_nodes_clear(&n->deps);
        free(n);
        return NULL;
    }
    n->graph = g;
    n->work = *work;
    if (g->last) g->last->next = n;
    else g->first = n;
    g->last = n;
    g->count++;
    return n;
}

static void drop(CUgraphNode n) {
    if (n->child) ke_graph_free(n->child);
    ke_nodes_clear(&n->deps);
    free(n);
}

void ke_node_free(CUgraphNode n) {
    CUgraph g = n->graph;
    CUgraphNode before = NULL;
    for (CUgraphNode o = g->first; o; o = o->next) {
        take_out(&o->deps, n);
        if (o->next == n) before = o;
    }
    if (before) before->next = n->next;
    else g->first = n->next;
    if (g->last == n) g->last = before;
    g->count--;
    drop(n);
}

/* ---- graphs -------------------------------------------------------------------------------------- */

CUgraph ke_graph_new(void) {
    CUgraph g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->next = graphs;
    graphs = g;
    return g;
}

CUgraph ke_graph_find(CUgraph handle) {
    CUgraph g = graphs;
    while (g && g != handle) g = g->next;
    return g;
}

void ke_graph_free(CUgraph g) {
    for (CUgraphNode n = g->first, next; n; n = next) {
        next = n->next;
        drop(n);
    }
    ke_held_drop(g);
    CUgraph *at = &graphs; /* only now: children have left the list meanwhile */
    while (*at != g) at = &(*at)->next;
    *at = g->next;
    free(g);
}

static CUgraphNode same_place(CUgraph from, CUgraph to, CUgraphNode n) {
    CUgraphNode twin = to->first;
    for (CUgraphNode o = from->first; o != n; o = o->next) twin = twin->next;
    return twin;
}

CUgraph ke_graph_clone(CUgraph g) {
    CUgraph copy = ke_graph_new();
    bool ok = copy != NULL;
    for (CUgraphNode n = g->first; n && ok; n = n->next) {
        CUgraphNode twin = ke_node_new(copy, &n->work, (struct ke_nodes){0});
        ok = twin != NULL;
        if (ok) twin->original = n;
        if (ok && n->child) ok = (twin->child = ke_graph_clone(n->child)) != NULL;
        if (ok && twin->child) twin->child->embedded = true;
    }
    for (CUgraphNode n = g->first; n && ok; n = n->next) {
        for (size_t i = 0; i < n->deps.count && ok; i++) /* an edge may go to a node added later */
            ok = ke_nodes_add(&same_place(g, copy, n)->deps, same_place(g, copy, n->deps.at[i]));
    }
    if (ok) ok = ke_held_clone(g, copy);
    if (ok || !copy) return copy;
    ke_graph_free(copy);
    return NULL;
}

static CUresult create(CUgraph *out, unsigned flags) {
    if (!out || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    CUgraph g = ke_graph_new();
    ke_mu_unlock();
    *out = g;
    return g ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
KE_API CUresult cuGraphCreate(CUgraph *phGraph, unsigned int flags) { KE_CALL(create(phGraph, flags)); }

static CUresult clone(CUgraph *out, CUgraph handle) {
    ke_mu_lock();
    CUgraph g = ke_graph_find(handle), copy = g && out ? ke_graph_clone(g) : NULL;
    if (copy) *out = copy;
    ke_mu_unlock();
    if (!g || !out) return CUDA_ERROR_INVALID_VALUE;
    return copy ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
KE_API CUresult cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph) {
    KE_CALL(clone(phGraphClone, originalGraph));
}

static CUresult in_clone(CUgraphNode *out, CUgraphNode original, CUgraph handle) {
    ke_mu_lock();
    CUgraph g = ke_graph_find(handle);
    CUgraphNode n = g ? g->first : NULL;
    while (n && n->original != original) n = n->next;
    if (n && out) *out = n;
    ke_mu_unlock();
    return n && out && original ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
KE_API CUresult cuGraphNodeFindInClone(CUgraphNode *phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph) {
    KE_CALL(in_clone(phNode, hOriginalNode, hClonedGraph));
}

static CUresult destroy(CUgraph handle) {
    ke_mu_lock();
    CUgraph g = ke_graph_find(handle);
    bool ours = g && !g->embedded && !g->capturing;
    if (ours) ke_graph_free(g);
    ke_mu_unlock();
    return ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
KE_API CUresult cuGraphDestroy(CUgraph hGraph) { KE_CALL(destroy(hGraph)); }

static CUresult destroy_node(CUgraphNode handle) {
    ke_mu_lock();
    CUgraphNode n = ke_node_find(handle);
    bool ours = n && !n->graph->capturing;
    if (ours) ke_node_free(n);
    ke_mu_unlock();
    return ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
KE_API CUresult cuGraphDestroyNode(CUgraphNode hNode) { KE_CALL(destroy_node(hNode)); }

/* ---- edges --------------------------------------------------------------------------------------- */

static CUresult change_edges(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to, size_t n, bool add) {
    ke_mu_lock();
    CUgraph g = ke_graph_find(handle);
    CUresult rc = g && (n == 0 || (from && to)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < n && rc == CUDA_SUCCESS; i++) {
        bool known = ke_node_in(g, from[i]) && ke_node_in(g, to[i]) && from[i] != to[i];
        if (!known || ke_nodes_hold(&to[i]->deps, from[i]) == add) rc = CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < n && rc == CUDA_SUCCESS; i++) {
        if (!add) take_out(&to[i]->deps, from[i]);
        else if (!ke_nodes_add(&to[i]->deps, from[i])) rc = CUDA_ERROR_OUT_OF_MEMORY;
    }
    ke_mu_unlock();
    return rc;
}
/* Data of edges say when a kernel lets the next one begin early; here nothing ever begins early. */
KE_API CUresult cuGraphAddDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
                                          const CUgraphEdgeData *edgeData, size_t n) {
    (void)edgeData;
    KE_CALL(change_edges(hGraph, from, to, n, true));
}
KE_API CUresult cuGraphRemoveDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
                                             const CUgraphEdgeData *edgeData, size_t n) {
    (void)edgeData;
    KE_CALL(change_edges(hGraph, from, to, n, false));
}

/* ---- questions ----------------------------------------------------------------------------------- */

/* Answers are counted; those for which there is room are also written, into one or two arrays. */
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
KE_API CUresult cuGraphGetNodes(CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes) {
    KE_CALL(list(hGraph, ALL, nodes, NULL, NULL, numNodes));
}
KE_API CUresult cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode *rootNodes, size_t *numRootNodes) {
    KE_CALL(list(hGraph, ROOTS, rootNodes, NULL, NULL, numRootNodes));
}
KE_API CUresult cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to,
                                   CUgraphEdgeData *edgeData, size_t *numEdges) {
    KE_CALL(list(hGraph, EDGES, from, to, edgeData, numEdges));
}

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

static CUresult type_of(CUgraphNode handle, CUgraphNodeType *type) {
    ke_mu_lock();
    CUgraphNode n = ke_node_find(handle);
    if (n && type) *type = (CUgraphNodeType)KE_JOB_TYPE(n->work.flags);
    ke_mu_unlock();
    return n && type ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
KE_API CUresult cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType *type) { KE_CALL(type_of(hNode, type)); }

static CUresult child_of(CUgraphNode handle, CUgraph *out) {
    ke_mu_lock();
    CUgraphNode n = ke_node_find(handle);
    if (n && n->child && out) *out = n->child;
    ke_mu_unlock();
    return n && n->child && out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
KE_API CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph *phGraph) {
    KE_CALL(child_of(hNode, phGraph));
}
