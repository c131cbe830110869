/* Faults that tests set where the driver or the system can refuse, and a count of the calls that the gate has let
 * through. */
#ifndef KP_TESTING_H
#define KP_TESTING_H

#include <stdbool.h>
#include <stdint.h>

enum kp_fault {
    KP_FAULT_CREATE,   /* no device memory */
    KP_FAULT_MAP,
    KP_FAULT_UNMAP,
    KP_FAULT_COPY_OUT,
    KP_FAULT_COPY_IN,
    KP_FAULT_PIN,      /* host memory cannot be registered */
    KP_FAULT_HOST,     /* no host memory */
    KP_FAULT_STALL,    /* no copy is seen to end */
    KP_FAULT_RESERVE,  /* no addresses */
    KP_FAULT_ACCESS,   /* to the program's own mappings */
    KP_FAULT_PAGES,    /* host memory is there, but no pages for it */
    KP_FAULTS
};

extern struct kp_fault_slot {
    int skip, count; /* `skip` calls pass, then `count` fail; negative count: for ever */
} kp_faults[KP_FAULTS];
bool kp_fault_take(enum kp_fault kind);
void kp_fault_set(enum kp_fault kind, int skip, int count);

static inline bool kp_fault(enum kp_fault kind) {
    return __builtin_expect(__atomic_load_n(&kp_faults[kind].count, __ATOMIC_RELAXED) != 0, 0) &&
           kp_fault_take(kind);
}

/* Returns the sum of the books that is wrong, or NULL. Call it only while nothing in this process allocates, frees or
 * moves. */
const char *kp_own_check(void);

/* Limits what the arena can get from the machine, including what it has. */
extern uint64_t kp_machine_bytes;
uint64_t kp_test_host_available(void);
#define kp_host_available kp_test_host_available

/* Incremented with release order: a reader also sees what the thread did before its call. */
extern uint64_t kp_passed;
static inline void kp_count_passage(void) { __atomic_fetch_add(&kp_passed, 1, __ATOMIC_RELEASE); }

#endif
