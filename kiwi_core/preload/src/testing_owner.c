/* What tests of the owner call through ctypes. */
#include "arena.h"
#include "fault.h"
#include "gate.h"
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
TEST(void) kiwi_preload_test_allow(uint64_t bytes) { kp_arena_allow(bytes); }
TEST(void) kiwi_preload_test_arena_books(struct kp_arena_books *books) { kp_arena_books(books); }
