/* Slabs: small allocations share one handle, a block of the driver's granularity, cut into equal slots.
 *
 * Sizes grow in half steps, so that less than a third of a slot is wasted, and every slot starts at a multiple
 * of 512 bytes, as the driver's own allocations do. */
#include <stdlib.h>

#include "owner/blocks.h"

/* 512, 1024, 1536, 2048, 3072, 4096 ... and at the end fractions of 2 MiB. */
static const uint32_t sizes[KP_CLASSES] = {
    512,    1024,   1536,   2048,   3072,   4096,   6144,   8192,   12288,
    16384,  24576,  32768,  49152,  65536,  98304,  131072, 174592, 209408,
    262144, 299520, 349184, 419328, 524288, 698880, 1048576, 0, 0,
};

int kp_slab_class(size_t bytes) {
    for (int i = 0; i < KP_CLASSES && sizes[i]; i++) {
        if (bytes <= sizes[i]) return i;
    }
    return -1;
}

size_t kp_slab_size(int slot_class) { return sizes[slot_class]; }

struct kp_block *kp_slab_partial(struct kp_ctx *ctx, int slot_class) { return ctx->partial[slot_class]; }

static void link_partial(struct kp_block *b) {
    struct kp_block **head = &b->ctx->partial[b->slot_class];
    b->partial_prev = NULL;
    b->partial_next = *head;
    if (*head) (*head)->partial_prev = b;
    *head = b;
}

static void unlink_partial(struct kp_block *b) {
    if (b->partial_prev) b->partial_prev->partial_next = b->partial_next;
    else b->ctx->partial[b->slot_class] = b->partial_next;
    if (b->partial_next) b->partial_next->partial_prev = b->partial_prev;
    b->partial_next = b->partial_prev = NULL;
}

bool kp_slab_begin(struct kp_block *b, int slot_class) {
    size_t n = b->bytes / sizes[slot_class];
    if (n >= KP_NO_SLOT) n = KP_NO_SLOT - 1; /* granularity beyond 32 MiB: the rest stays unused */
    b->slots = calloc(n, sizeof *b->slots);
    if (!b->slots) return false;
    b->slot_class = (uint16_t)slot_class;
    b->slot_count = (uint16_t)n;
    for (size_t i = 0; i < n; i++) b->slots[i].next = i + 1 < n ? (uint16_t)(i + 1) : KP_NO_SLOT;
    link_partial(b);
    return true;
}

CUdeviceptr kp_slab_take(struct kp_block *b, size_t asked) {
    static uint64_t next_id = 1ull << 62; /* never an id of the driver or of a large block */
    uint16_t i = b->first_free;
    struct kp_slot *s = &b->slots[i];
    b->first_free = s->next;
    s->asked = (uint32_t)asked;
    s->id = ++next_id;
    b->used++;
    if (b->first_free == KP_NO_SLOT) unlink_partial(b);
    return b->addr + (CUdeviceptr)i * sizes[b->slot_class];
}

/* Returns the live slot that holds p; NULL: p is in no slot, or beyond the bytes asked for. */
struct kp_slot *kp_slab_slot(struct kp_block *b, CUdeviceptr p, CUdeviceptr *start) {
    size_t i = (size_t)(p - b->addr) / sizes[b->slot_class];
    if (i >= b->slot_count) return NULL;
    *start = b->addr + i * sizes[b->slot_class];
    return p - *start < b->slots[i].asked ? &b->slots[i] : NULL;
}

void kp_slab_give(struct kp_block *b, struct kp_slot *slot) {
    slot->asked = 0;
    slot->next = b->first_free;
    if (b->first_free == KP_NO_SLOT) link_partial(b);
    b->first_free = (uint16_t)(slot - b->slots);
    b->used--;
}

void kp_slab_retire(struct kp_block *b) { /* takes the block out of the list before it is destroyed */
    if (b->first_free != KP_NO_SLOT) unlink_partial(b);
}
