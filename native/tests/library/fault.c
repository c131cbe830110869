#include "owner/pieces.h"
#include "testing.h"

#include <pthread.h>

uint64_t kp_passed;
struct kp_fault_slot kp_faults[KP_FAULTS];
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;

bool kp_fault_take(enum kp_fault kind) {
    struct kp_fault_slot *f = &kp_faults[kind];
    pthread_mutex_lock(&mu);
    bool hit = f->count != 0 && f->skip == 0;
    if (f->count != 0 && f->skip > 0) f->skip--;
    else if (hit && f->count > 0) __atomic_store_n(&f->count, f->count - 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&mu);
    return hit;
}

void kp_fault_set(enum kp_fault kind, int skip, int count) {
    if ((unsigned)kind >= KP_FAULTS) return;
    pthread_mutex_lock(&mu);
    kp_faults[kind].skip = skip;
    __atomic_store_n(&kp_faults[kind].count, count, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&mu);
}

#undef kp_host_available
#define RESERVE_BYTES ((uint64_t)256 << 20) /* as in arena.c */
uint64_t kp_machine_bytes = UINT64_MAX;

uint64_t kp_test_host_available(void) {
    uint64_t most = __atomic_load_n(&kp_machine_bytes, __ATOMIC_RELAXED), has = kp_arena_total_bytes();
    if (most == UINT64_MAX) return kp_host_available();
    return RESERVE_BYTES + (most > has ? most - has : 0);
}
