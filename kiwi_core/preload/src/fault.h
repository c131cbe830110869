/* Faults that tests set, at the places where the driver or the system can say no. */
#ifndef KP_FAULT_H
#define KP_FAULT_H

#include <stdbool.h>

enum kp_fault {
    KP_FAULT_CREATE,   /* no device memory */
    KP_FAULT_MAP,
    KP_FAULT_UNMAP,
    KP_FAULT_COPY_OUT,
    KP_FAULT_COPY_IN,
    KP_FAULT_PIN,      /* host memory cannot be registered */
    KP_FAULT_HOST,     /* no host memory */
    KP_FAULT_STALL,    /* a copy out is not seen to end */
    KP_FAULTS
};

extern struct kp_fault_slot {
    int skip, count; /* passes so many, then fails so many; negative count: for ever */
} kp_faults[KP_FAULTS];
bool kp_fault_take(enum kp_fault kind);
void kp_fault_set(enum kp_fault kind, int skip, int count);

static inline bool kp_fault(enum kp_fault kind) {
    return __builtin_expect(__atomic_load_n(&kp_faults[kind].count, __ATOMIC_RELAXED) != 0, 0) &&
           kp_fault_take(kind);
}

#endif
