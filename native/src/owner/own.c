/* Allocates and frees owned memory. */
#include "owner/own.h"

#include <stdlib.h>

#include "base/daemon.h"
#include "base/kiwi_preload.h"
#include "base/real.h"
#include "gate/gate.h"
#include "owner/blocks.h"
#include "owner/room.h"

bool kp_moving, kp_forked;
struct kp_books kp_totals;
static struct kp_block *dead_blocks; /* kp_table_mu */
static bool slots_wait;              /* likewise: slots were freed in a capture */

static void forked(void) { kp_forked = true; }

static void once(void) { kp_at_fork(forked); }

void kp_own_start(CUdevice device) {
    static pthread_once_t guard = PTHREAD_ONCE_INIT;
    pthread_once(&guard, once);
    kp_gpu_learn(device);
}

/* ---- allocating ------------------------------------------------------------------------------------ */

/* Passes an allocation on to the driver, and counts it by the reason why it cannot be ours. */
static CUresult foreign(CUdeviceptr *p, size_t bytes, enum kp_foreign kind) {
    struct kp_room room = {.bytes = bytes, .asks = true, .elsewhere = kind == KP_FOREIGN_GPU};
    CUresult rc;
    do rc = kp_real.cuMemAlloc_v2(p, bytes);
    while (kp_room_again(&room, rc));
    if (rc != CUDA_SUCCESS) return rc;
    kp_own_seen_foreign(kind, (int64_t)bytes);
    struct kp_block *b = calloc(1, sizeof *b);
    if (!b) return rc; /* the memory stays counted for ever */
    *b = (struct kp_block){.addr = *p, .bytes = bytes, .asked = bytes, .foreign = kind};
    pthread_mutex_lock(&kp_table_mu);
    kp_table_add(b);
    pthread_mutex_unlock(&kp_table_mu);
    return rc;
}

struct kp_ctx *kp_own_current(CUdevice *device) {
    CUcontext handle;
    *device = -1;
    if (kp_forked || kp_real.cuCtxGetCurrent(&handle) != CUDA_SUCCESS || !handle) return NULL;
    if (kp_real.cuCtxGetDevice(device) != CUDA_SUCCESS) {
        *device = -1;
        return NULL;
    }
    kp_own_start(*device);
    if (!kp_gpu.usable || *device != kp_gpu.device) return NULL;
    struct kp_ctx *c = kp_ctx_of(handle, *device);
    if (c && !__atomic_exchange_n(&c->owns, true, __ATOMIC_ACQ_REL)) kp_arena_wake();
    return c;
}

static CUdeviceptr from_partial(struct kp_ctx *ctx, int slot_class, size_t bytes) {
    CUdeviceptr p = 0;
    pthread_mutex_lock(&kp_table_mu);
    struct kp_block *slab = kp_slab_partial(ctx, slot_class);
    if (slab) p = kp_slab_take(slab, bytes);
    pthread_mutex_unlock(&kp_table_mu);
    if (p) kp_books_add(&kp_totals.small_overhead, -(int64_t)bytes);
    return p;
}

static CUresult new_slab(struct kp_ctx *ctx, int slot_class, size_t bytes, CUdeviceptr *p) {
    struct kp_block *b;
    CUresult rc = kp_block_make(ctx, kp_gpu.granularity, &b);
    if (rc != CUDA_SUCCESS) return rc;
    pthread_mutex_lock(&kp_table_mu);
    bool ok = kp_slab_begin(b, slot_class);
    if (ok) {
        kp_table_add(b);
        *p = kp_slab_take(b, bytes);
    }
    pthread_mutex_unlock(&kp_table_mu);
    if (ok) kp_books_add(&kp_totals.small_overhead, (int64_t)b->bytes - (int64_t)bytes);
    else kp_block_end(b);
    return ok ? CUDA_SUCCESS : CUDA_ERROR_MAP_FAILED;
}

static CUresult new_large(struct kp_ctx *ctx, size_t bytes, CUdeviceptr *p) {
    static uint64_t next_id = 1ull << 61;
    struct kp_block *b;
    CUresult rc = kp_block_make(ctx, bytes, &b);
    if (rc != CUDA_SUCCESS) return rc;
    b->asked = bytes;
    *p = b->addr;
    kp_books_add(&kp_totals.small_overhead, (int64_t)(b->bytes - bytes));
    pthread_mutex_lock(&kp_table_mu);
    b->id = ++next_id;
    kp_table_add(b);
    pthread_mutex_unlock(&kp_table_mu);
    return rc;
}

static CUresult attempt(struct kp_ctx *ctx, size_t bytes, CUdeviceptr *p) {
    int slot_class = kp_slab_class(bytes);
    if (slot_class < 0 || kp_slab_size(slot_class) * 2 > kp_gpu.granularity) return new_large(ctx, bytes, p);
    *p = from_partial(ctx, slot_class, bytes);
    return *p ? CUDA_SUCCESS : new_slab(ctx, slot_class, bytes, p);
}

static void allocations_changed(void) {
    kp_arena_aim(__atomic_load_n(&kp_totals.owned, __ATOMIC_RELAXED));
    kp_daemon_books_changed();
}

CUresult kp_own_alloc(CUdeviceptr *p, size_t bytes) {
    struct kp_room room = {.bytes = bytes, .asks = true};
    CUresult rc;
    do { /* nothing is held while it waits for room, which a signal handler may leave */
        CUdevice device;
        struct kp_ctx *ctx = p && bytes ? kp_own_current(&device) : NULL;
        if (!ctx && p && bytes && !kp_forked && device >= 0) /* we cannot own the memory of this GPU or driver */
            return foreign(p, bytes, device != kp_gpu.device ? KP_FOREIGN_GPU : KP_FOREIGN_PLAIN);
        if (!ctx) return kp_real.cuMemAlloc_v2(p, bytes); /* the driver says what is wrong */
        rc = attempt(ctx, bytes, p);
        kp_ctx_let_go(ctx);
    } while (kp_room_again(&room, rc));
    if (rc == CUDA_SUCCESS) allocations_changed();
    else if (rc != CUDA_ERROR_OUT_OF_MEMORY) rc = foreign(p, bytes, KP_FOREIGN_PLAIN);
    return rc;
}

CUresult kp_own_alloc_pitch(CUdeviceptr *p, size_t *pitch, size_t width, size_t height, unsigned elem) {
    size_t wide = (width + 511) / 512 * 512; /* the driver's own pitch on every GPU so far */
    bool valid = elem == 4 || elem == 8 || elem == 16;
    if (!p || !pitch || !valid || width == 0 || height == 0 || wide < width || wide > SIZE_MAX / height)
        return kp_real.cuMemAllocPitch_v2(p, pitch, width, height, elem);
    CUresult rc = kp_own_alloc(p, wide * height);
    if (rc == CUDA_SUCCESS) *pitch = wide;
    return rc;
}

/* ---- freeing ----------------------------------------------------------------------------------------- */

static bool resident(const struct kp_block *b) {
    for (unsigned i = 0; i < b->chunk_count; i++) {
        if (__atomic_load_n(&b->chunks[i].where, __ATOMIC_ACQUIRE) != KP_OUT) return true;
    }
    return false;
}

/* Waits for work that may still use the memory, as the driver's own free does. Returns false if it cannot wait
 * now: a stream of the process is being captured, and synchronising would break the capture. */
static bool settled(struct kp_ctx *ctx, CUresult *rc) {
    *rc = CUDA_SUCCESS;
    if (kp_gate_capturing()) return false;
    CUresult got = kp_ctx_synchronize(ctx);
    if (got >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && got <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
        return false;
    *rc = got;
    return true;
}

static void add_dead_block(struct kp_block *b) { /* kp_table_mu held; b is no longer in the table */
    __atomic_store_n(&b->dead, true, __ATOMIC_RELEASE); /* the pager reads this without the mutex */
    b->next_dead = dead_blocks;
    dead_blocks = b;
}

struct kp_block *kp_own_take_dead_blocks(const struct kp_ctx *ctx) {
    struct kp_block *found = NULL, *b;
    for (struct kp_block **at = &dead_blocks; (b = *at);) {
        if (b->ctx != ctx) {
            at = &b->next_dead;
            continue;
        }
        *at = b->next_dead;
        b->next_dead = found;
        found = b;
    }
    return found;
}

/* `ending` is the context that the caller is about to destroy; no pass uses its blocks any more. */
void kp_own_end_dead_blocks(struct kp_ctx *ending) {
    struct kp_block *mine = NULL, *b;
    pthread_mutex_lock(&kp_table_mu);
    for (struct kp_block **at = &dead_blocks; (b = *at);) {
        if (b->ctx != ending && (kp_moving || !kp_ctx_hold(b->ctx))) {
            at = &b->next_dead; /* the thread that destroys the context ends the block */
            continue;
        }
        *at = b->next_dead;
        b->next_dead = mine;
        mine = b;
    }
    pthread_mutex_unlock(&kp_table_mu);
    while ((b = mine)) {
        struct kp_ctx *ctx = b->ctx;
        mine = b->next_dead;
        if (resident(b)) kp_ctx_synchronize(ctx);
        kp_block_end(b);
        if (ctx != ending) kp_ctx_let_go(ctx);
    }
}

/* Frees a block; kp_table_mu held, released here. */
static CUresult free_large(struct kp_block *b) {
    CUresult rc = CUDA_SUCCESS;
    struct kp_ctx *ctx = b->ctx;
    bool now = !kp_moving, wait = now && resident(b) && kp_ctx_hold(ctx);
    kp_books_add(&kp_totals.small_overhead, -(int64_t)(b->bytes - b->asked));
    kp_table_remove(b);
    if (wait) {
        pthread_mutex_unlock(&kp_table_mu);
        now = settled(ctx, &rc);
        pthread_mutex_lock(&kp_table_mu);
        kp_ctx_let_go_locked(ctx);
    }
    if (!now) add_dead_block(b);
    pthread_mutex_unlock(&kp_table_mu);
    if (now) kp_block_end(b);
    return rc;
}

/* Takes an empty slab out of use; kp_table_mu held. Returns false if the pager destroys it later. */
static bool retire(struct kp_block *b) {
    kp_books_add(&kp_totals.small_overhead, -(int64_t)b->bytes);
    kp_slab_retire(b);
    kp_table_remove(b);
    if (kp_moving) add_dead_block(b);
    return !kp_moving;
}

/* Frees a slot; kp_table_mu held, released here. The slot is reused only when the GPU is done with it: one that is
 * freed in a capture waits for the end of all captures. */
static CUresult free_small(struct kp_block *b, struct kp_slot *slot) {
    CUresult rc = CUDA_SUCCESS;
    struct kp_ctx *ctx = b->ctx;
    bool reuse = true;
    kp_books_add(&kp_totals.small_overhead, slot->asked);
    slot->asked = 0; /* from here on a second free is an error; the slab stays, because it is in use */
    if (!kp_moving && resident(b) && kp_ctx_hold(ctx)) {
        pthread_mutex_unlock(&kp_table_mu);
        reuse = settled(ctx, &rc);
        pthread_mutex_lock(&kp_table_mu);
        kp_ctx_let_go_locked(ctx);
    }
    if (reuse) kp_slab_give(b, slot);
    else slot->freed = KP_FREED_IN_CAPTURE, slots_wait = true;
    bool end = b->used == 0 && retire(b);
    pthread_mutex_unlock(&kp_table_mu);
    if (end) kp_block_end(b);
    return rc;
}

/* ---- what was freed in a capture ---- */

struct slots { /* of one context */
    struct kp_ctx *ctx;
    enum kp_freed from, to; /* to 0: the slots may be used again */
    bool found;
    struct kp_block *empty; /* slabs without a live slot, by next_dead */
};

static void change_slots(struct kp_block *b, void *arg) {
    struct slots *s = arg;
    if (b->ctx != s->ctx || !b->slots) return;
    for (uint16_t i = 0; i < b->slot_count; i++) {
        if (b->slots[i].freed != s->from) continue;
        s->found = true;
        b->slots[i].freed = (uint8_t)s->to;
        if (!s->to) kp_slab_give(b, &b->slots[i]);
    }
    if (b->used > 0) return;
    b->next_dead = s->empty;
    s->empty = b;
}

static bool change(struct slots s) { /* kp_table_mu held, released meanwhile */
    struct kp_block *ended = NULL, *b;
    kp_table_each(change_slots, &s);
    while ((b = s.empty)) {
        s.empty = b->next_dead;
        if (!retire(b)) continue;
        b->next_dead = ended;
        ended = b;
    }
    pthread_mutex_unlock(&kp_table_mu);
    while ((b = ended)) {
        ended = b->next_dead;
        kp_block_end(b);
    }
    pthread_mutex_lock(&kp_table_mu);
    return s.found;
}

static void give_back_slots(struct kp_ctx *ctx) {
    CUresult rc;
    pthread_mutex_lock(&kp_table_mu);
    bool found = change((struct slots){.ctx = ctx, .from = KP_FREED_IN_CAPTURE, .to = KP_FREED_SETTLING});
    pthread_mutex_unlock(&kp_table_mu);
    if (!found) return;
    bool over = settled(ctx, &rc); /* no: another capture has begun */
    pthread_mutex_lock(&kp_table_mu);
    change((struct slots){.ctx = ctx, .from = KP_FREED_SETTLING, .to = over ? 0 : KP_FREED_IN_CAPTURE});
    slots_wait = slots_wait || !over;
    pthread_mutex_unlock(&kp_table_mu);
}

void kp_own_captures_over(void) {
    static pthread_mutex_t settling = PTHREAD_MUTEX_INITIALIZER;
    struct kp_ctx **contexts;
    pthread_mutex_lock(&kp_table_mu);
    bool slots = slots_wait, blocks = dead_blocks && !kp_moving;
    slots_wait = false;
    pthread_mutex_unlock(&kp_table_mu);
    if (blocks) kp_own_end_dead_blocks(NULL);
    if (slots) {
        pthread_mutex_lock(&settling); /* another thread's wait began before these slots were freed */
        size_t count = kp_ctx_hold_all(&contexts, false);
        for (size_t i = 0; i < count; i++) {
            give_back_slots(contexts[i]);
            kp_ctx_let_go(contexts[i]);
        }
        free(contexts);
        pthread_mutex_unlock(&settling);
    }
    if (slots || blocks) allocations_changed();
}

CUresult kp_own_free(CUdeviceptr p) {
    if (p == 0 || kp_forked) return kp_real.cuMemFree_v2(p);
    CUdeviceptr start = 0;
    pthread_mutex_lock(&kp_table_mu);
    struct kp_block *b = kp_ctx_block_at(p);
    bool has_dead = dead_blocks && !kp_moving;
    struct kp_slot *slot = b && b->slots ? kp_slab_slot(b, p, &start) : NULL;
    CUresult rc;
    if (slot && start == p) {
        rc = free_small(b, slot);
    } else if (b && b->ctx && !b->slots && b->addr == p) {
        rc = free_large(b);
    } else {
        bool counted = b && !b->ctx && b->addr == p;
        if (counted) kp_table_remove(b);
        pthread_mutex_unlock(&kp_table_mu);
        if (counted) kp_block_end(b);
        rc = kp_real.cuMemFree_v2(p);
    }
    if (has_dead && !kp_gate_capturing()) kp_own_end_dead_blocks(NULL);
    if (rc == CUDA_SUCCESS) allocations_changed();
    return rc;
}

CUresult kp_own_free_async(CUdeviceptr p, CUstream stream) {
    return kp_own_has(p) ? kp_own_free(p) : kp_real.cuMemFreeAsync(p, stream);
}
