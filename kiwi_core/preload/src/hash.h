/* Which leaves (2 MiB) of a chunk changed since they were copied: a keyed hash of 128 bits, on the
 * GPU at the speed of its memory.
 *
 * Each leaf is 512 rows of 256 vectors of 16 bytes.  Column t is hashed by NH (sums of products of
 * words and keys, as in UMAC) four times with shifted keys, and the 256 columns by sums modulo
 * 2^61 - 1, twice.  Two different leaves collide with a chance of 2^-121 over the choice of the keys,
 * which each process draws at random.
 */
#ifndef KP_HASH_H
#define KP_HASH_H

#include "blocks.h"

#define KP_LEAF_BYTES ((size_t)2 << 20)
#define KP_HASH_KEY_BYTES 40992u

struct kp_digest {
    uint64_t half[2];
};

/* The same on the CPU: the reference, and the self-test of what runs on the GPU. */
void kp_hash_leaf(const void *leaf, const void *keys, struct kp_digest *out);

/* In the background: loads the code into a context, and tries it before it is trusted. */
void kp_hash_prepare(struct kp_ctx *ctx);
bool kp_hash_ready(const struct kp_ctx *ctx);
bool kp_hash_ready_everywhere(void);
const char *kp_hash_text(void); /* the PTX, for tests */
/* Submits to the pager's stream; the results are in kp_hash_result(ctx, first...) when that is done.
 * False: no room for that many. */
bool kp_hash_room(const struct kp_ctx *ctx, size_t first, size_t leaves);
CUresult kp_hash_submit(struct kp_ctx *ctx, CUdeviceptr at, size_t first, size_t leaves);
const struct kp_digest *kp_hash_result(const struct kp_ctx *ctx, size_t first);

#endif
