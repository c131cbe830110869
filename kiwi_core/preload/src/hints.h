/* What the program holds and does not use: blocks that a framework has in its cache, free.  A way out
 * neither copies nor hashes leaves of which nothing is used, and on the way in they are only mapped.
 *
 * The program says so by kiwi_preload_free_ranges, and the next call that passes the gate ends it: only
 * through such a call can anybody write there what somebody may read.  What a framework had queued
 * before, the way out waits for; and a block that it hands out without a call holds nothing yet.
 */
#ifndef KP_HINTS_H
#define KP_HINTS_H

#include "hash.h"

/* By a pass, the gate closed and the GPU still: remembers in each chunk that is in the GPU which of its
 * leaves are blank.  They are, until the chunk is in the GPU again and the gate opens. */
void kp_hints_mark(struct kp_block *const *blocks, size_t count);
/* Of memory that is given back, and of all of it when a context ends. */
void kp_hints_freed(CUdeviceptr at, size_t bytes);
void kp_hints_forget(void);

static inline bool kp_blank(const struct kp_chunk *c, size_t leaf) {
    return leaf < KP_BLANK_LEAVES && c->blank[leaf / 64] >> leaf % 64 & 1;
}
size_t kp_blank_bytes(const struct kp_chunk *c);
static inline bool kp_blank_all(const struct kp_chunk *c) { return kp_blank_bytes(c) == c->bytes; }
/* The first leaf after `leaf` that is not as that one, or `end`. */
size_t kp_blank_run(const struct kp_chunk *c, size_t leaf, size_t end);

#endif
