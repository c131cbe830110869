/* User objects: an object of the program that graphs keep alive, and its destructor. The destructor runs after the last
 * reference is dropped, on a thread that has left the driver or is one of the driver's. */
#include <stdlib.h>

#include "graph.h"

struct CUuserObject_st {
    CUuserObject next;
    CUhostFn destroy;
    void *data;
    uint64_t refs;
};
static CUuserObject alive, dead;

static CUuserObject find(CUuserObject handle) {
    CUuserObject o = alive;
    while (o && o != handle) o = o->next;
    return o;
}

static void drop(CUuserObject o, uint64_t count) { /* ke.mu held */
    o->refs -= count;
    if (o->refs) return;
    CUuserObject *at = &alive;
    while (*at != o) at = &(*at)->next;
    *at = o->next;
    o->next = dead;
    __atomic_store_n(&dead, o, __ATOMIC_RELEASE);
}

void ke_user_objects_bury(void) {
    if (!__atomic_load_n(&dead, __ATOMIC_ACQUIRE)) return;
    ke_mu_lock();
    CUuserObject all = dead;
    __atomic_store_n(&dead, NULL, __ATOMIC_RELEASE);
    ke_mu_unlock();
    bool before = ke_in_callback;
    ke_in_callback = true;
    for (CUuserObject next; all; all = next) {
        next = all->next;
        all->destroy(all->data);
        free(all);
    }
    ke_in_callback = before;
}

/* ---- what a graph holds (ke.mu held) ------------------------------------------------------------- */

static struct ke_held *held_by(CUgraph g, CUuserObject o) {
    struct ke_held *h = g->held;
    while (h && h->object != o) h = h->next;
    return h;
}

static bool hold(CUgraph g, CUuserObject o, uint64_t count) {
    struct ke_held *h = held_by(g, o);
    if (!h && (h = calloc(1, sizeof *h))) {
        *h = (struct ke_held){g->held, o, 0};
        g->held = h;
    }
    if (h) h->count += count;
    return h != NULL;
}

bool ke_held_clone(CUgraph from, CUgraph to) {
    for (struct ke_held *h = from->held; h; h = h->next) {
        if (!hold(to, h->object, 1)) return false;
        h->object->refs++;
    }
    return true;
}

void ke_held_drop(CUgraph g) {
    for (struct ke_held *h = g->held, *next; h; h = next) {
        next = h->next;
        drop(h->object, h->count);
        free(h);
    }
    g->held = NULL;
}

/* ---- calls --------------------------------------------------------------------------------------- */

KE_ENTRY(cuUserObjectCreate, (CUuserObject *out, void *data, CUhostFn destroy, unsigned count, unsigned flags),
         (out, data, destroy, count, flags)) {
    if (!out || !destroy || count == 0 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
        return CUDA_ERROR_INVALID_VALUE;
    CUuserObject o = malloc(sizeof *o);
    if (!o) return CUDA_ERROR_OUT_OF_MEMORY;
    ke_mu_lock();
    *o = (struct CUuserObject_st){alive, destroy, data, count};
    alive = *out = o;
    ke_mu_unlock();
    return CUDA_SUCCESS;
}

static CUresult change(CUuserObject handle, unsigned count, bool more) {
    ke_mu_lock();
    CUuserObject o = find(handle);
    bool can = o && count && (more || count <= o->refs);
    if (can && more) o->refs += count;
    else if (can) drop(o, count);
    ke_mu_unlock();
    return can ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
KE_FORWARD(cuUserObjectRetain, (CUuserObject object, unsigned count), change(object, count, true))
KE_FORWARD(cuUserObjectRelease, (CUuserObject object, unsigned count), change(object, count, false))

/* Adds references of a graph. With MOVE the graph takes over references of the caller. */
KE_ENTRY(cuGraphRetainUserObject, (CUgraph graph, CUuserObject object, unsigned count, unsigned flags),
         (graph, object, count, flags)) {
    ke_mu_lock();
    CUgraph g = ke_graph_find(graph);
    CUuserObject o = find(object);
    bool can = g && o && count && flags <= CU_GRAPH_USER_OBJECT_MOVE;
    CUresult rc = can ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (can && !hold(g, o, count)) rc = CUDA_ERROR_OUT_OF_MEMORY;
    if (rc == CUDA_SUCCESS && flags != CU_GRAPH_USER_OBJECT_MOVE) o->refs += count;
    ke_mu_unlock();
    return rc;
}

KE_ENTRY(cuGraphReleaseUserObject, (CUgraph graph, CUuserObject object, unsigned count), (graph, object, count)) {
    ke_mu_lock();
    CUgraph g = ke_graph_find(graph);
    struct ke_held *h = g ? held_by(g, object) : NULL;
    bool can = h && count && count <= h->count;
    if (can) {
        h->count -= count;
        CUuserObject o = h->object;
        if (h->count == 0) {
            struct ke_held **at = &g->held;
            while (*at != h) at = &(*at)->next;
            *at = h->next;
            free(h);
        }
        drop(o, count);
    }
    ke_mu_unlock();
    return can ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
