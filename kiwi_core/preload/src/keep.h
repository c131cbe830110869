/* The host copies of what is in the GPU, kept after a page-in: on the next way out only what changed
 * since then is copied, as the hashes tell. */
#ifndef KP_KEEP_H
#define KP_KEEP_H

#include "lane.h"

void kp_keep_prepare(void); /* once, by a thread of the program: reads the environment */
bool kp_keep_wanted(void);  /* else nothing is hashed */
/* Forgets what an earlier pass hashed; `next_leaf` is where this one's results begin. */
void kp_keep_begin(struct kp_chunk *c);
/* Submits the hashing of a chunk that is in the GPU; on trouble it just counts as changed. */
void kp_keep_hash(struct kp_ctx *ctx, struct kp_flight f, size_t *next_leaf);
bool kp_keep_changed(const struct kp_ctx *ctx, const struct kp_chunk *c, size_t leaf);
bool kp_keep_any_changed(const struct kp_ctx *ctx, const struct kp_chunk *c);
/* KIWI_VERIFY=1: compares what the hashes say is unchanged, byte by byte; what is not is copied. */
CUresult kp_keep_verify(struct kp_lane *lane, struct kp_flight f, int64_t until_ns);

bool kp_keep_room(size_t bytes); /* so much more may be kept */
void kp_keep_left(const struct kp_ctx *ctx, struct kp_chunk *c);  /* out: its copy is what was hashed */
void kp_keep_cleaned(const struct kp_ctx *ctx, struct kp_chunk *c); /* in, and its copy is what was hashed */
void kp_keep_arrived(struct kp_chunk *c, bool keep);             /* in: keeps the copy, or gives it back */
void kp_keep_drop(struct kp_chunk *c, bool give); /* the copy is no longer worth anything */

#endif
