/* Graphs and their nodes: making, copying and joining them. A handle is valid if it is in the list, so a stale
 * handle gets an error. */
#include <stdlib.h>

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
    CUgraph *at = &graphs; /* not earlier: children have left the list meanwhile */
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
        for (size_t i = 0; i < n->deps.count && ok; i++) /* a node may depend on one that was added later */
            ok = ke_nodes_add(&same_place(g, copy, n)->deps, same_place(g, copy, n->deps.at[i]));
    }
    if (ok) ok = ke_held_clone(g, copy);
    if (ok || !copy) return copy;
    ke_graph_free(copy);
    return NULL;
}

KE_ENTRY(cuGraphCreate, (CUgraph *out, unsigned flags), (out, flags)) {
    if (!out || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    CUgraph g = ke_graph_new();
    ke_mu_unlock();
    *out = g;
    return g ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

KE_ENTRY(cuGraphClone, (CUgraph *out, CUgraph handle), (out, handle)) {
    ke_mu_lock();
    CUgraph g = ke_graph_find(handle), copy = g && out ? ke_graph_clone(g) : NULL;
    if (copy) *out = copy;
    ke_mu_unlock();
    if (!g || !out) return CUDA_ERROR_INVALID_VALUE;
    return copy ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

KE_ENTRY(cuGraphNodeFindInClone, (CUgraphNode *out, CUgraphNode original, CUgraph handle), (out, original, handle)) {
    ke_mu_lock();
    CUgraph g = ke_graph_find(handle);
    CUgraphNode n = g ? g->first : NULL;
    while (n && n->original != original) n = n->next;
    if (n && out) *out = n;
    ke_mu_unlock();
    return n && out && original ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

KE_ENTRY(cuGraphDestroy, (CUgraph handle), (handle)) {
    ke_mu_lock();
    CUgraph g = ke_graph_find(handle);
    bool ours = g && !g->embedded && !g->capturing;
    if (ours) ke_graph_free(g);
    ke_mu_unlock();
    return ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

KE_ENTRY(cuGraphDestroyNode, (CUgraphNode handle), (handle)) {
    ke_mu_lock();
    CUgraphNode n = ke_node_find(handle);
    bool ours = n && !n->graph->capturing;
    if (ours) ke_node_free(n);
    ke_mu_unlock();
    return ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

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
/* The data of an edge says when a kernel lets the next node begin early; here no node begins early. */
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
/* The forms of CUDA 10, as those that follow _v2 in the other files: edges without data. */
KE_FORWARD(cuGraphAddDependencies, (CUgraph g, const CUgraphNode *from, const CUgraphNode *to, size_t n),
           change_edges(g, from, to, n, true))
KE_FORWARD(cuGraphRemoveDependencies, (CUgraph g, const CUgraphNode *from, const CUgraphNode *to, size_t n),
           change_edges(g, from, to, n, false))
