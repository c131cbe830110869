#include "allowed.h"

#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "link.h"
#include "move.h"

static uint64_t keep = UINT64_MAX; /* atomic: written by the pager thread only */
static bool wanted = true, cleaning;
static unsigned changes;

static void take(uint64_t arena_bytes, uint64_t keep_bytes, bool clean) {
    if (keep_bytes != keep || clean != cleaning) changes++;
    cleaning = clean;
    __atomic_store_n(&keep, keep_bytes, __ATOMIC_RELAXED);
    kp_move_forget(keep_bytes); /* before the arena: what it was in may be whole pieces then */
    kp_arena_allow(arena_bytes);
    kp_link_books_changed();
}

static uint64_t or_ours(int64_t bytes) { return bytes < 0 ? UINT64_MAX : (uint64_t)bytes; }

void kp_limits_heard(int64_t arena_bytes, int64_t keep_bytes, bool clean) {
    take(or_ours(arena_bytes), or_ours(keep_bytes), clean);
}

void kp_limits_own(void) {
    if (cleaning || keep != UINT64_MAX) changes++;
    cleaning = false;
    __atomic_store_n(&keep, UINT64_MAX, __ATOMIC_RELAXED);
    kp_arena_allow(UINT64_MAX);
}

void kp_limits_idle(void) { take(0, 0, false); }

uint64_t kp_limits_keep(void) { return __atomic_load_n(&keep, __ATOMIC_RELAXED); }

void kp_limits_prepare(void) {
    const char *word = getenv("KIWI_PRELOAD_CLEAN");
    wanted = !word || strcmp(word, "0") != 0;
}

bool kp_limits_may_clean(void) { return wanted && cleaning; }

unsigned kp_limits_changes(void) { return changes; }
