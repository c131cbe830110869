/* Shared declarations of the emulated NVML's parts. */
#ifndef KIWI_NVML_H
#define KIWI_NVML_H

#include <stdbool.h>

#include "state.h"

#define API __attribute__((visibility("default")))

typedef int nvmlReturn_t;
typedef struct nvmlDevice_st *nvmlDevice_t;

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    GPU_IS_LOST = 15,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    VERSION_MISMATCH = 25, /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */
    UNKNOWN = 999,
};

struct reading { /* the last look at one process, to compute its busy share since then */
    int32_t pid;
    uint64_t start_ticks, at_ns, busy_ns, stamp_us;
    unsigned percent;
};
struct nvmlDevice_st {
    unsigned gpu;
    struct reading readings[KE_PROCS_MAX];
    uint64_t at_ns, busy_ns;
    unsigned percent;
};

extern struct ke_state *state;
extern pthread_mutex_t mu; /* before the state's own lock */

bool ready(void); /* first in each call: whether NVML is initialised; waits while the driver holds this process */
nvmlReturn_t check(nvmlDevice_t device);
uint64_t shown(const struct ke_proc *p, unsigned gpu);

#endif
