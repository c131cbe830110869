/* Functions that tests call through ctypes: the pager's moves by hand, without a daemon. */
#include <stdio.h>

#include "base/kiwi_preload.h"
#include "gate/gate.h"
#include "owner/arena.h"
#include "owner/move.h"
#include "owner/own.h"
#include "testing.h"

#define TEST(type) KP_API __attribute__((used)) type

TEST(int) kiwi_preload_test_close(int64_t within_ns) { return kp_gate_close(kp_now_ns() + within_ns); }
TEST(int) kiwi_preload_test_shut(int64_t within_ns) { return kp_gate_shut(kp_now_ns() + within_ns); }
TEST(unsigned) kiwi_preload_test_inside_any(void) { return kp_gate_inside_any(); }
TEST(void) kiwi_preload_test_open(void) { kp_gate_open(); }
TEST(void) kiwi_preload_test_arm(int armed) { kp_gate_arm(armed); }
TEST(uint64_t) kiwi_preload_test_passed(void) { return __atomic_load_n(&kp_passed, __ATOMIC_ACQUIRE); }
TEST(unsigned) kiwi_preload_test_inside(void) { return kp_gate_inside(); }
TEST(void) kiwi_preload_test_books(struct kp_books *books) { kp_own_books(books); }

static int told(const struct kp_outcome *outcome, char *detail, size_t room) {
    if (detail && room) snprintf(detail, room, "%s: %s", outcome->reason ? outcome->reason : "", outcome->detail);
    return (int)outcome->what;
}

/* Closes the gate, waits for the GPU and pages everything out; the gate stays closed if that succeeds. Returns 0: moved,
 * 1: refused, 2: lost; `detail` gets the reason. */
TEST(int) kiwi_preload_test_out(int64_t within_ns, char *detail, size_t room) {
    int64_t until_ns = kp_now_ns() + within_ns;
    struct kp_outcome outcome = {.what = KP_REFUSED, .reason = "", .detail = "the gate did not close"};
    if (!kp_gate_close(until_ns)) return told(&outcome, detail, room);
    kp_move_settle(until_ns, &outcome);
    if (outcome.what == KP_MOVED) kp_move_out(until_ns, &outcome);
    if (outcome.what == KP_MOVED) return told(&outcome, detail, room);
    if (kp_move_all_in() || outcome.what == KP_LOST) kp_gate_open(); /* else part of the memory is still out */
    return told(&outcome, detail, room);
}

/* Pages everything in and opens the gate; if that fails, the gate stays closed for another try. */
TEST(int) kiwi_preload_test_in(int64_t within_ns, char *detail, size_t room) {
    struct kp_outcome outcome = {.what = KP_MOVED};
    kp_move_in(kp_now_ns() + within_ns, &outcome);
    if (outcome.what == KP_MOVED) kp_gate_open();
    return told(&outcome, detail, room);
}

/* ---- the owner ---- */

TEST(const char *) kiwi_preload_test_check(void) {
    const char *wrong = kp_own_check();
    return wrong ? wrong : "";
}
TEST(void) kiwi_preload_test_fault(int kind, int skip, int count) {
    kp_fault_set((enum kp_fault)kind, skip, count);
}
TEST(void) kiwi_preload_test_arena(int enable) { kp_arena_enable(enable); }
TEST(void) kiwi_preload_test_allow(uint64_t bytes) { kp_arena_allow(bytes); }
TEST(void) kiwi_preload_test_leaky(void) { kp_gate_is_leaky(); }
static bool never(void) { return false; }
TEST(int) kiwi_preload_test_ahead(void) { return kp_move_ahead(never); }
TEST(void) kiwi_preload_test_forget(void) { kp_move_forget_ahead(); }
TEST(void) kiwi_preload_test_arena_books(struct kp_arena_books *books) { kp_arena_books(books); }
TEST(void) kiwi_preload_test_machine(uint64_t bytes) { __atomic_store_n(&kp_machine_bytes, bytes, __ATOMIC_RELAXED); }
