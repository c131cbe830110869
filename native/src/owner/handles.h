/* Objects that the program makes by cuMemCreate, and where it maps them; for vmm.c, vmm_move.c and stay.c only.
 *
 * The program holds a *name* where it would hold the driver's handle: a handle ends with a page-out, a name does not. An
 * object lives while the program has a reference to it or a mapping of it, as the driver's memory does. All of this is
 * guarded by kp_table_mu. */
#ifndef KP_HANDLES_H
#define KP_HANDLES_H

#include "owner/blocks.h"

struct kp_mapping {
    struct kp_mapping *next; /* of the same object */
    struct kp_object *of;
    CUdeviceptr at;
    size_t bytes, offset;
    unsigned long long flags;
    bool there;     /* the driver has it: not so while the memory is out */
    bool reachable; /* likewise, with its access */
    unsigned access_count;
    CUmemAccessDesc *access; /* one for each location that may reach it */
};

struct kp_object {
    struct kp_object *next; /* in the hash of names */
    CUmemGenericAllocationHandle name;
    CUmemGenericAllocationHandle handle; /* the driver's; 0: the memory is not in the GPU */
    CUmemAllocationProp prop;
    unsigned long long flags;
    unsigned references; /* that the program holds by the name */
    struct kp_mapping *mappings;
    CUdeviceptr window; /* an address range of ours for a copy; 0: none */
    unsigned window_failures;
    struct kp_block *block; /* with one chunk; in no table */
};

/* ---- handles.c (kp_table_mu held) ---- */
bool kp_is_name(CUmemGenericAllocationHandle handle);
struct kp_object *kp_object_named(CUmemGenericAllocationHandle handle); /* NULL: none of ours */
bool kp_object_add(struct kp_object *o);                               /* gives it a name; false: no memory */
/* Takes an object out of the tables if nothing refers to it any more. The caller ends it outside of the mutex. */
bool kp_object_over(struct kp_object *o);
bool kp_mapping_add(struct kp_mapping *m);
void kp_mapping_remove(struct kp_mapping *m); /* frees it */
/* Mappings in the order of addresses. The first gets the index of the first that ends behind `at`. */
size_t kp_mapping_from(CUdeviceptr at);
struct kp_mapping *kp_mapping_number(size_t i); /* NULL: there are not so many */
struct kp_mapping *kp_mapping_at(CUdeviceptr at);

#endif
