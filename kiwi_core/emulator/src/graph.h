/* Graphs: what a node does is the same thing as a job of a stream, kept to be done again and again. */
#ifndef KIWI_EMU_GRAPH_H
#define KIWI_EMU_GRAPH_H

#include "emu.h"

struct CUgraphNode_st {
    CUgraphNode next;     /* in the order in which they were added */
    CUgraph graph;
    struct ke_work work;  /* without a function: empty, or a child's */
    CUgraph child;        /* its own copy */
    CUgraphNode original; /* in the graph of which this one is a clone; perhaps gone */
    struct ke_nodes deps;
    bool placed; /* a mark, while an order is made or looked at */
};

struct ke_held {
    struct ke_held *next;
    CUuserObject object;
    uint64_t count;
};

struct CUgraph_st {
    CUgraph next;
    CUgraphNode first, last;
    size_t count;
    struct ke_held *held; /* user objects */
    bool embedded;  /* a node owns it */
    bool capturing; /* a capture does */
};

struct ke_capture {
    struct ke_capture *next;
    CUgraph graph;
    CUstream origin;
    CUstreamCaptureMode mode;
    uint64_t thread, id;
    bool invalid;
    struct ke_nodes loose; /* where forked streams were that are destroyed; joined, perhaps */
};

/* ---- graph.c (ke.mu held) ---- */
CUgraph ke_graph_new(void); /* NULL: no host memory; so do the others that return a handle */
CUgraph ke_graph_find(CUgraph handle); /* NULL: there is no such graph */
CUgraph ke_graph_clone(CUgraph g);
void ke_graph_free(CUgraph g);
CUgraphNode ke_node_new(CUgraph g, const struct ke_work *work, struct ke_nodes deps);
CUgraphNode ke_node_find(CUgraphNode handle);
bool ke_node_in(CUgraph g, CUgraphNode handle);
void ke_node_free(CUgraphNode n); /* and every edge to it */
bool ke_nodes_add(struct ke_nodes *set, CUgraphNode n); /* once; false: no host memory */
bool ke_nodes_hold(const struct ke_nodes *set, CUgraphNode n);
void ke_nodes_clear(struct ke_nodes *set);

/* ---- capture.c (ke.mu held) ---- */
CUresult ke_capture_implicit(CUstream s, bool spoil); /* has the legacy stream to wait for a capture? */

/* ---- user_object.c (ke.mu held) ---- */
bool ke_held_clone(CUgraph from, CUgraph to); /* false: no host memory */
void ke_held_drop(CUgraph g);

/* ---- graph_exec.c ---- */
/* Adds what one launch of an executable graph does; for a launch into a capture (ke.mu held). */
CUresult ke_node_of_launch(CUgraph g, CUgraph what, struct ke_nodes deps, CUgraphNode *out);

#endif
