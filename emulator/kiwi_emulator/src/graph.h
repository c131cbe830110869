/* Graphs: a node keeps a job of a stream, to run it again and again. */
#ifndef KIWI_EMU_GRAPH_H
#define KIWI_EMU_GRAPH_H

#include "emu.h"

struct CUgraphNode_st {
    CUgraphNode next;     /* in the order of adding */
    CUgraph graph;
    struct ke_work work;  /* without a function: an empty node, or a child graph */
    CUgraph child;        /* the node's own copy */
    CUgraphNode original; /* the node in the graph that this one's was cloned from; perhaps gone */
    struct ke_nodes deps;
    bool placed; /* a mark for making or checking an order */
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
    bool embedded;  /* a node owns the graph */
    bool capturing; /* a capture owns the graph */
};

struct ke_capture {
    struct ke_capture *next;
    CUgraph graph;
    CUstream origin;
    CUstreamCaptureMode mode;
    uint64_t thread, id;
    bool invalid;
    struct ke_nodes loose; /* the last nodes of destroyed forked streams, whether joined or not */
};

/* ---- graph.c (ke.mu held) ---- */
CUgraph ke_graph_new(void); /* NULL: no host memory, as in the other functions that return a new handle */
CUgraph ke_graph_find(CUgraph handle); /* NULL: there is no such graph */
CUgraph ke_graph_clone(CUgraph g);
void ke_graph_free(CUgraph g);
CUgraphNode ke_node_new(CUgraph g, const struct ke_work *work, struct ke_nodes deps);
CUgraphNode ke_node_find(CUgraphNode handle);
bool ke_node_in(CUgraph g, CUgraphNode handle);
void ke_node_free(CUgraphNode n); /* frees the node and every edge to it */
bool ke_nodes_add(struct ke_nodes *set, CUgraphNode n); /* adds n unless it is there; false: no host memory */
bool ke_nodes_hold(const struct ke_nodes *set, CUgraphNode n);
void ke_nodes_clear(struct ke_nodes *set);

/* ---- capture.c (ke.mu held) ---- */
CUresult ke_capture_implicit(CUstream s, bool spoil); /* error: the legacy stream would wait for a capture */

/* ---- user_object.c (ke.mu held) ---- */
bool ke_held_clone(CUgraph from, CUgraph to); /* false: no host memory */
void ke_held_drop(CUgraph g);

/* ---- graph_exec.c ---- */
/* Adds a node that does what a launch of an executable graph does; for a launch into a capture (ke.mu held). */
CUresult ke_node_of_launch(CUgraph g, CUgraph what, struct ke_nodes deps, CUgraphNode *out);

#endif
