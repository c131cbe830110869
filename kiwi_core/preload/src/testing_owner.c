/* What tests of the owner call through ctypes. */
#include <string.h>

#include "arena.h"
#include "fault.h"
#include "gate.h"
#include "hash.h"
#include "kiwi_preload.h"
#include "move.h"
#include "own.h"

#define TEST(type) KP_API __attribute__((used)) type

/* Which sum of the books is wrong; "" none.  Only while nothing is under way. */
TEST(const char *) kiwi_preload_test_check(void) {
    const char *wrong = kp_own_check();
    return wrong ? wrong : "";
}
TEST(void) kiwi_preload_test_fault(int kind, int skip, int count) {
    kp_fault_set((enum kp_fault)kind, skip, count);
}
TEST(void) kiwi_preload_test_arena(int enable, uint64_t limit) {
    kp_arena_limit(limit);
    kp_arena_enable(enable);
}
TEST(void) kiwi_preload_test_trim(uint64_t keep) { kp_arena_trim(keep); }
TEST(void) kiwi_preload_test_arena_books(struct kp_arena_books *books) { kp_arena_books(books); }
TEST(void) kiwi_preload_test_move_books(struct kp_move_books *books) { kp_move_books(books); }
TEST(void) kiwi_preload_test_forget(void) { kp_move_forget(0); }

/* A slice of cleaning: the bytes copied, -1 if it was refused; *more: it was not the last. */
TEST(int64_t) kiwi_preload_test_clean(uint64_t most, int64_t within_ns, int *more) {
    int64_t until_ns = kp_now_ns() + within_ns;
    struct kp_outcome outcome;
    *more = 0;
    if (!kp_gate_close(until_ns)) return -1;
    kp_move_settle(until_ns, &outcome);
    if (outcome.what == KP_MOVED) *more = kp_move_clean(most, until_ns, &outcome);
    kp_gate_open();
    return outcome.what == KP_MOVED ? (int64_t)outcome.bytes : -1;
}

/* Every context that owns memory can be hashed. */
TEST(int) kiwi_preload_test_hashing(void) { return kp_hash_ready_everywhere(); }
TEST(void) kiwi_preload_test_hash(const void *leaf, const void *keys, uint64_t digest[2]) {
    struct kp_digest d;
    kp_hash_leaf(leaf, keys, &d);
    memcpy(digest, d.half, sizeof d.half);
}
TEST(const char *) kiwi_preload_test_ptx(void) { return kp_hash_text(); }
