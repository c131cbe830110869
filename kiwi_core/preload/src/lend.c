/* What a keeper (kiwi_core/pager/keeper) borrows of this library, which it loads like any other: it
 * hashes another process's memory, by the same code. */
#include <string.h>

#include "hash.h"
#include "kiwi_preload.h"

#define LENT(type) KP_API __attribute__((used)) type

LENT(const char *) kiwi_preload_hash_text(void) { return kp_hash_text(); }
LENT(void) kiwi_preload_hash_leaf(const void *leaf, const void *keys, uint64_t digest[2]) {
    struct kp_digest d;
    kp_hash_leaf(leaf, keys, &d);
    memcpy(digest, d.half, sizeof d.half);
}
