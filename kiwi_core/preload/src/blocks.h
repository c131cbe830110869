/* What the owner's parts know of each other: blocks of address space, their chunks of memory, and
 * the contexts they belong to.
 *
 * One mutex, kp_table_mu, guards the table, slots and contexts.  No driver call runs under it.
 * While a pager moves memory (kp_moving) no block is destroyed: frees only mark, and the pager
 * buries what died meanwhile when it is done.
 */
#ifndef KP_BLOCKS_H
#define KP_BLOCKS_H

#include <pthread.h>

#include "arena.h"
#include "own.h"

#define KP_CLASSES 27
#define KP_NO_SLOT UINT16_MAX

enum kp_where {
    KP_IN,       /* in the GPU */
    KP_ARRIVING, /* mapped, its bytes not known to be there: the host copy is what counts */
    KP_OUT,      /* in host memory */
};

struct kp_chunk { /* one handle */
    size_t bytes;
    enum kp_where where;
    struct kp_copy copy; /* host memory; complete unless where is KP_IN */
};

struct kp_slot {
    uint64_t id;      /* CU_POINTER_ATTRIBUTE_BUFFER_ID */
    uint32_t asked;   /* 0: not live */
    uint16_t next;    /* the next free one */
};

struct kp_block {
    struct kp_block *left, *right; /* table.c */
    uint32_t weight;
    CUdeviceptr addr;
    size_t bytes, asked; /* asked: 0 for a slab */
    uint64_t id;
    struct kp_ctx *ctx; /* NULL: not owned, merely counted as `foreign` */
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

struct kp_ctx { /* a context that owns memory, or did work we must wait for */
    struct kp_ctx *next;
    CUcontext handle;
    CUdevice device;
    bool primary, going; /* going: it is being destroyed */
    bool owns;           /* memory was allocated in it; else only its work is waited for */
    unsigned users;      /* threads of ours that need it alive */
    CUstream stream;     /* the pager's; see kp_ctx_prepare */
    struct kp_block *partial[KP_CLASSES];
};

struct kp_gpu { /* the one GPU whose memory is owned */
    bool known, usable; /* usable: it has virtual memory management */
    CUdevice device;
    size_t total_bytes, granularity, chunk_bytes;
    bool rdma;
    uint64_t peers; /* devices that may reach it */
};

extern pthread_mutex_t kp_table_mu;
extern struct kp_gpu kp_gpu;
extern bool kp_moving;    /* kp_table_mu held to change or trust it */
extern bool kp_forked;    /* a child has nothing of ours */

/* ---- table.c (kp_table_mu held) ---- */
void kp_table_add(struct kp_block *b);
void kp_table_remove(struct kp_block *b);
struct kp_block *kp_table_at(CUdeviceptr p); /* the block that holds p, or NULL */
size_t kp_table_count(void);
/* Calls for each block in address order; the function may not change the table. */
void kp_table_each(void (*fn)(struct kp_block *b, void *arg), void *arg);

/* ---- slab.c (kp_table_mu held) ---- */
int kp_slab_class(size_t bytes); /* -1: not small */
size_t kp_slab_size(int slot_class);
struct kp_block *kp_slab_partial(struct kp_ctx *ctx, int slot_class);
bool kp_slab_begin(struct kp_block *b, int slot_class); /* makes a new block a slab; false: no memory */
CUdeviceptr kp_slab_take(struct kp_block *b, size_t asked);
struct kp_slot *kp_slab_slot(struct kp_block *b, CUdeviceptr p, CUdeviceptr *start);
void kp_slab_give(struct kp_block *b, struct kp_slot *slot); /* free; kp_slab_retire if it is empty now */
void kp_slab_retire(struct kp_block *b);

/* ---- contexts.c ---- */
struct kp_ctx *kp_ctx_of(CUcontext handle, CUdevice device); /* finds or makes its record; held */
bool kp_ctx_hold(struct kp_ctx *c);  /* kp_table_mu held: it will not be destroyed until let go */
void kp_ctx_let_go(struct kp_ctx *c);
void kp_ctx_let_go_locked(struct kp_ctx *c); /* kp_table_mu held */
struct kp_ctx *kp_ctx_hold_any(void); /* NULL: there is none */
/* Those that own memory, but for one that is just ending; or all, after those that are just ending have
 * ended or gone on. free() the list after letting go of each. */
size_t kp_ctx_hold_all(struct kp_ctx ***list, bool owners);
CUresult kp_ctx_push(struct kp_ctx *c);        /* current, and in relaxed capture mode */
void kp_ctx_pop(struct kp_ctx *c);
CUresult kp_ctx_prepare(struct kp_ctx *c); /* held: what a way out needs of the GPU */
CUresult kp_ctx_synchronize(struct kp_ctx *c);

/* ---- physical.c ---- */
void kp_gpu_learn(CUdevice device);
CUresult kp_physical_map(CUdeviceptr at, size_t bytes); /* new memory, no access to it yet */
CUresult kp_physical_access(CUdeviceptr at, size_t bytes);
CUresult kp_physical_unmap(CUdeviceptr at, size_t bytes);
CUresult kp_block_make(struct kp_ctx *ctx, size_t asked, struct kp_block **out);
void kp_block_end(struct kp_block *b); /* not in the table any more; nothing uses its memory */
uint64_t kp_block_overhead(const struct kp_block *b); /* kp_table_mu held: what nobody asked for */
void kp_bytes_moved(struct kp_chunk *c, enum kp_where to); /* changes its place and the books */

/* ---- own.c ---- */
/* Ends blocks that were freed while that could not be done; `ending`: the context that the caller is
 * about to destroy, or NULL. */
void kp_own_bury(struct kp_ctx *ending);
/* kp_table_mu held: takes out what was freed of a context that has ended; a list by next_dead. */
struct kp_block *kp_own_graves(const struct kp_ctx *ctx);
void kp_books_add(uint64_t *field, int64_t bytes);
extern struct kp_books kp_totals;

#endif
