/* Shared declarations of the owner's parts: blocks of address space, their chunks of memory, and the
 * contexts that they belong to.
 *
 * One mutex, kp_table_mu, guards the table, the slots and the contexts. No driver call runs under it.
 * While a pager moves memory (kp_moving), no block is destroyed: a free only marks its block, and the pager
 * destroys the marked blocks when it is done.
 */
#ifndef KP_BLOCKS_H
#define KP_BLOCKS_H

#include <pthread.h>

#include "owner/arena.h"
#include "owner/own.h"

#define KP_CLASSES 27
#define KP_NO_SLOT UINT16_MAX

enum kp_where {
    KP_IN,       /* in the GPU */
    KP_ARRIVING, /* mapped, but perhaps without its bytes: the host copy counts */
    KP_OUT,      /* in host memory */
};

struct kp_chunk { /* the memory of one handle */
    size_t bytes;
    enum kp_where where;
    struct kp_copy copy; /* host memory; complete unless where is KP_IN */
    uint64_t epoch; /* while KP_IN: the gate's epoch in which `copy` was completed (ahead.c); 0: none */
};

struct kp_slot {
    uint64_t id;      /* CU_POINTER_ATTRIBUTE_BUFFER_ID */
    uint32_t asked;   /* bytes; 0: not live */
    uint16_t next;    /* the next free slot */
    uint8_t freed;    /* enum kp_freed */
};

enum kp_freed { /* of a slot that is not live, and may not be used again yet */
    KP_FREED_IN_CAPTURE = 1, /* until no capture is open, because waiting for the GPU would break one */
    KP_FREED_SETTLING,       /* likewise; the GPU is being waited for */
};

struct kp_block {
    struct kp_block *left, *right; /* table.c */
    uint32_t weight;
    CUdeviceptr addr;
    size_t bytes, asked; /* asked: 0 for a slab */
    uint64_t id;
    struct kp_ctx *ctx; /* NULL: not owned, only counted as `foreign`, or an object's */
    struct kp_object *object; /* of the program's cuMemCreate (handles.h): in no table, with one chunk */
    bool stays;               /* never moves, and counts as `foreign`; the memory of an allocation otherwise */
    enum kp_foreign foreign;
    bool dead;          /* freed while something was moving, or inside a capture */
    struct kp_block *next_dead;
    /* slabs */
    struct kp_slot *slots;
    struct kp_block *partial_next, *partial_prev; /* slabs of this size with a free slot */
    uint16_t slot_class, slot_count, used, first_free;
    unsigned chunk_count;
    struct kp_chunk chunks[];
};

struct kp_ctx { /* a context that owns memory, or whose work we must wait for */
    struct kp_ctx *next;
    CUcontext handle;
    CUdevice device;
    bool primary, going; /* going: being destroyed */
    bool owns;           /* memory was allocated in the context; else we only wait for its work */
    unsigned users;      /* threads of ours that need the context alive */
    CUstream stream;     /* the pager's stream; see kp_ctx_prepare */
    struct kp_block *partial[KP_CLASSES];
};

struct kp_gpu { /* the one GPU whose memory is owned */
    bool known, usable; /* usable: the GPU has virtual memory management */
    CUdevice device;
    size_t total_bytes, granularity, chunk_bytes;
    bool rdma;
    uint64_t peers; /* a bit for each device that may reach its memory */
};

extern pthread_mutex_t kp_table_mu;
extern struct kp_gpu kp_gpu;
extern bool kp_moving;    /* hold kp_table_mu to change it or rely on it */
extern bool kp_forked;    /* true in a forked child, which owns nothing */

/* ---- table.c (kp_table_mu held) ---- */
void kp_table_add(struct kp_block *b);
void kp_table_remove(struct kp_block *b);
struct kp_block *kp_table_at(CUdeviceptr p); /* returns the block that holds p, or NULL */
size_t kp_table_count(void);
/* Calls fn for each block in address order; fn may not change the table. */
void kp_table_each(void (*fn)(struct kp_block *b, void *arg), void *arg);

/* ---- slab.c (kp_table_mu held) ---- */
int kp_slab_class(size_t bytes); /* -1: not small */
size_t kp_slab_size(int slot_class);
struct kp_block *kp_slab_partial(struct kp_ctx *ctx, int slot_class);
bool kp_slab_begin(struct kp_block *b, int slot_class); /* makes a slab of a new block; false: no memory */
CUdeviceptr kp_slab_take(struct kp_block *b, size_t asked);
struct kp_slot *kp_slab_slot(struct kp_block *b, CUdeviceptr p, CUdeviceptr *start);
void kp_slab_give(struct kp_block *b, struct kp_slot *slot); /* frees; call kp_slab_retire if b is empty now */
void kp_slab_retire(struct kp_block *b);

/* ---- contexts.c ---- */
struct kp_ctx *kp_ctx_of(CUcontext handle, CUdevice device); /* finds or makes the record, and holds it */
bool kp_ctx_hold(struct kp_ctx *c);  /* kp_table_mu held: c is not destroyed until it is let go */
/* Returns the block at p, once no thread is releasing its context; NULL: none. For a free, which has to wait for the
 * GPU, and cannot do so in a context that may be going; it usually stays. kp_table_mu held, released meanwhile. */
struct kp_block *kp_ctx_block_at(CUdeviceptr p);
void kp_ctx_let_go(struct kp_ctx *c);
void kp_ctx_let_go_locked(struct kp_ctx *c); /* kp_table_mu held */
struct kp_ctx *kp_ctx_hold_any(void); /* NULL: no context can be held */
/* Holds and lists the contexts that own memory, except one that is being destroyed; or, without `owners`, all
 * contexts, after waiting until no destruction is under way. Let go of each context, then free() the list. */
size_t kp_ctx_hold_all(struct kp_ctx ***list, bool owners);
/* Returns a context of our GPU, held: one that is there, or else one that is made. NULL: none can be had. */
struct kp_ctx *kp_ctx_lend(bool *made);
void kp_ctx_take_back(struct kp_ctx *c, bool made); /* lets go of it; `made`: by the above */
CUresult kp_ctx_push(struct kp_ctx *c);        /* makes c current, in relaxed capture mode */
void kp_ctx_pop(struct kp_ctx *c);
CUresult kp_ctx_prepare(struct kp_ctx *c); /* c held: creates what a page-out needs in the GPU */
CUresult kp_ctx_synchronize(struct kp_ctx *c);

/* ---- physical.c ---- */
void kp_gpu_learn(CUdevice device);
CUresult kp_physical_map(CUdeviceptr at, size_t bytes); /* maps new memory, without access to it yet */
CUresult kp_physical_access(CUdeviceptr at, size_t bytes);
CUresult kp_physical_unmap(CUdeviceptr at, size_t bytes);
CUresult kp_block_make(struct kp_ctx *ctx, size_t asked, struct kp_block **out);
void kp_block_end(struct kp_block *b); /* b has left the table, and nothing uses its memory */
uint64_t kp_block_overhead(const struct kp_block *b); /* kp_table_mu held: bytes that nobody asked for */
void kp_bytes_moved(struct kp_chunk *c, enum kp_where to); /* changes the chunk's place and the books */
/* Counts a block that has come (1), or goes (-1): as owned, or as what it is if it is not. */
void kp_block_count(const struct kp_block *b, int sign);

/* ---- stay.c ---- */
void kp_block_stays(struct kp_block *b, enum kp_foreign kind); /* kp_table_mu held */

/* ---- handles.c, vmm.c (kp_table_mu held) ---- */
void kp_vmm_each(void (*fn)(struct kp_block *b, void *arg), void *arg); /* the blocks of the program's objects */
size_t kp_vmm_count(void);
void kp_vmm_await_changes(void); /* before a pass begins; kp_table_mu released meanwhile */
void kp_vmm_pass_over(void);

/* ---- vmm_move.c: while kp_moving keeps the object as it is ---- */
CUresult kp_object_open(struct kp_object *o); /* sets block->addr to where all of it may be read and written */
CUresult kp_object_open_for_out(struct kp_object *o); /* likewise; leaves the object to the driver if that fails often */
CUresult kp_object_close(struct kp_object *o); /* an error leaves the range of ours open, for another try */
CUresult kp_object_out(struct kp_object *o); /* takes the memory away; after an error all is as before, or ARRIVING */
CUresult kp_object_in(struct kp_object *o);  /* opened; it may be called again after an error */

/* ---- own.c ---- */
/* Returns the current context's record, held, and notes that it owns memory; NULL: its memory is not ours to manage. */
struct kp_ctx *kp_own_current(CUdevice *device);
/* Destroys blocks that could not be destroyed when they were freed; `ending` is the context that the caller
 * is about to destroy, or NULL. */
void kp_own_end_dead_blocks(struct kp_ctx *ending);
/* Takes out the freed blocks of a destroyed context, as a list by next_dead; kp_table_mu held. */
struct kp_block *kp_own_take_dead_blocks(const struct kp_ctx *ctx);
void kp_books_add(uint64_t *field, int64_t bytes);
extern struct kp_books kp_totals;

#endif
