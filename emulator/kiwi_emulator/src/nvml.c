/* The part of NVML that nvidia-ml-py needs to show memory and processes; nvml_use.c has the utilisation. */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "nvml.h"

#define MEMORY_V2 0x02000028u

struct ke_state *state;
static int users;
pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;

static struct nvmlDevice_st devices[KE_GPUS_MAX];

/* ---- start and end -------------------------------------------------------------------------------- */

/* Hangs for ever if KIWI_EMULATOR_HANG names the call. */
static void may_hang(const char *call) {
    const char *named = getenv("KIWI_EMULATOR_HANG");
    while (named && strcmp(named, call) == 0) pause();
}

#define HELD_POLL_NS 1000000

static void wait_while_held(void) {
    while (state->quirks & KE_NVML_WAITS && ke_process_held(state)) ke_sleep_ns(HELD_POLL_NS);
}

bool ready(void) {
    if (users) wait_while_held();
    return users;
}

static nvmlReturn_t start(void) {
    const char *why = NULL;
    may_hang("nvmlInit");
    pthread_mutex_lock(&mu);
    if (!state) state = ke_state_get(&why);
    pthread_mutex_unlock(&mu);
    if (state) wait_while_held();
    pthread_mutex_lock(&mu);
    if (state) users++;
    else fprintf(stderr, "kiwi emulated NVML: no device: %s\n", why);
    for (unsigned i = 0; i < KE_GPUS_MAX; i++) devices[i].gpu = i;
    pthread_mutex_unlock(&mu);
    return state ? SUCCESS : DRIVER_NOT_LOADED;
}
API nvmlReturn_t nvmlInit(void) { return start(); }
API nvmlReturn_t nvmlInit_v2(void) { return start(); }
API nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return start();
}
API nvmlReturn_t nvmlShutdown(void) {
    ready();
    pthread_mutex_lock(&mu);
    nvmlReturn_t rc = users ? SUCCESS : UNINITIALIZED;
    if (users) users--;
    pthread_mutex_unlock(&mu);
    return rc;
}

API const char *nvmlErrorString(nvmlReturn_t result) {
    switch (result) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case GPU_IS_LOST: return "GPU is lost";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case VERSION_MISMATCH: return "Argument Version Mismatch";
    default: return "Unknown Error";
    }
}

static nvmlReturn_t text_out(char *out, unsigned length, const char *text) {
    if (!ready()) return UNINITIALIZED;
    if (!out) return INVALID_ARGUMENT;
    if (strlen(text) + 1 > length) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}
API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    return text_out(version, length, state ? state->driver_name : NULL);
}
API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    char name[KE_DRIVER_MAX + 3];
    snprintf(name, sizeof name, "13.%s", state ? state->driver_name : "");
    return text_out(version, length, name);
}
API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    if (!ready()) return UNINITIALIZED;
    if (!version) return INVALID_ARGUMENT;
    *version = (int)state->driver_version;
    return SUCCESS;
}
API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    return nvmlSystemGetCudaDriverVersion(version);
}

/* ---- devices ---------------------------------------------------------------------------------------- */

nvmlReturn_t check(nvmlDevice_t d) {
    if (!ready()) return UNINITIALIZED;
    for (unsigned i = 0; i < state->gpu_count; i++) {
        if (d == &devices[i] && state->gpus[i].lost) return GPU_IS_LOST;
        if (d == &devices[i]) return SUCCESS;
    }
    return INVALID_ARGUMENT;
}

API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    if (!ready()) return UNINITIALIZED;
    if (!count) return INVALID_ARGUMENT;
    *count = state->gpu_count;
    return SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    if (!ready()) return UNINITIALIZED;
    if (!device || index >= state->gpu_count) return INVALID_ARGUMENT;
    *device = &devices[index];
    return state->gpus[index].lost ? GPU_IS_LOST : SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static void spell_uuid(unsigned gpu, char *out) {
    const uint8_t *u = state->gpus[gpu].uuid;
    out += sprintf(out, "GPU-");
    for (int i = 0; i < 16; i++)
        out += sprintf(out, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", u[i]);
}

API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    char own[48];
    if (!ready()) return UNINITIALIZED;
    if (!uuid || !device) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < state->gpu_count; i++) {
        spell_uuid(i, own);
        if (strcmp(own, uuid) != 0) continue;
        *device = &devices[i];
        return state->gpus[i].lost ? GPU_IS_LOST : SUCCESS;
    }
    return NOT_FOUND;
}
API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *name, unsigned length) {
    nvmlReturn_t rc = check(d);
    return rc ? rc : text_out(name, length, state->gpus[d->gpu].name);
}
API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *uuid, unsigned length) {
    char own[48];
    nvmlReturn_t rc = check(d);
    if (rc) return rc;
    spell_uuid(d->gpu, own);
    return text_out(uuid, length, own);
}

static nvmlReturn_t number_out(nvmlDevice_t d, unsigned *out, unsigned value) {
    nvmlReturn_t rc = check(d);
    if (rc == SUCCESS && !out) rc = INVALID_ARGUMENT;
    if (rc == SUCCESS) *out = value;
    return rc;
}
API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t d, unsigned *index) {
    return number_out(d, index, check(d) ? 0 : d->gpu);
}
API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t d, unsigned *minor) {
    return number_out(d, minor, check(d) ? 0 : d->gpu);
}
API nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t d, unsigned *mode) {
    return number_out(d, mode, 1);
}
API nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t d, unsigned *mode) { return number_out(d, mode, 0); }
API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned *current, unsigned *pending) {
    nvmlReturn_t rc = check(d);
    if (rc == SUCCESS && (!current || !pending)) rc = INVALID_ARGUMENT;
    if (rc == SUCCESS && !(state->quirks & KE_MIG)) rc = NOT_SUPPORTED;
    if (rc == SUCCESS) *current = *pending = 1;
    return rc;
}
API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t d, int *major, int *minor) {
    nvmlReturn_t rc = check(d);
    if (rc == SUCCESS && (!major || !minor)) rc = INVALID_ARGUMENT;
    if (rc == SUCCESS) *major = 9, *minor = 0;
    return rc;
}

/* ---- memory and processes ----------------------------------------------------------------------------- */

struct memory {
    unsigned long long total, free, used;
};
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

static uint64_t used_of(unsigned gpu) {
    ke_state_lock(state);
    ke_reap(state);
    uint64_t used = ke_gpu_used(state, gpu);
    ke_state_unlock(state);
    return used;
}
API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t d, struct memory *m) {
    may_hang("nvmlDeviceGetMemoryInfo");
    nvmlReturn_t rc = check(d);
    if (rc || !m) return rc ? rc : INVALID_ARGUMENT;
    ke_fault_hang(state, 0, KE_OP_NVML_MEMORY);
    uint64_t used = used_of(d->gpu), total = state->gpus[d->gpu].total_bytes;
    *m = (struct memory){total, total - used, used};
    return SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, struct memory_v2 *m) {
    nvmlReturn_t rc = check(d);
    if (rc || !m) return rc ? rc : INVALID_ARGUMENT;
    if (m->version != MEMORY_V2) return VERSION_MISMATCH;
    uint64_t used = used_of(d->gpu), total = state->gpus[d->gpu].total_bytes;
    *m = (struct memory_v2){MEMORY_V2, total, 0, total - used, used};
    return SUCCESS;
}

struct process_info {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

/* Returns the bytes in a process's row; 0: it has no row. A small part of a context counts for the GPU, but
 * in no row. */
uint64_t shown(const struct ke_proc *p, unsigned gpu) {
    uint64_t context = p->context_bytes[gpu];
    if (state->quirks & KE_NO_PROCESS_ROWS) return 0;
    bool hides = state->quirks & KE_HIDDEN_OVERHEAD && context > KE_HIDDEN_BYTES; /* emulated contexts may be small */
    return p->device_bytes[gpu] + context - (hides ? KE_HIDDEN_BYTES : 0);
}

static nvmlReturn_t processes(nvmlDevice_t d, unsigned *count, struct process_info *out) {
    may_hang("nvmlDeviceGetComputeRunningProcesses");
    nvmlReturn_t rc = check(d);
    if (rc || !count) return rc ? rc : INVALID_ARGUMENT;
    ke_fault_hang(state, 0, KE_OP_NVML_PROCESSES);
    unsigned room = out ? *count : 0, n = 0;
    ke_state_lock(state);
    ke_reap(state);
    for (int i = 0; i < KE_PROCS_MAX; i++) {
        const struct ke_proc *p = &state->procs[i];
        uint64_t used = shown(p, d->gpu);
        int pid = p->pid && used ? ke_pid_here(state, p) : 0;
        if (pid <= 0) continue; /* NVML does not name processes of another PID namespace */
        if (state->quirks & KE_NO_PROCESS_SIZES) used = ~0ull; /* NVML_VALUE_NOT_AVAILABLE */
        if (n < room) out[n] = (struct process_info){(unsigned)pid, used, ~0u, ~0u};
        n++;
    }
    ke_state_unlock(state);
    *count = n;
    return n > room ? INSUFFICIENT_SIZE : SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned *count,
                                                         struct process_info *infos) {
    return processes(d, count, infos);
}
API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t d, unsigned *count,
                                                         struct process_info *infos) {
    return processes(d, count, infos);
}

/* The first version of the struct has no instances. */
struct process_info_v1 {
    unsigned pid;
    unsigned long long used;
};
API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t d, unsigned *count,
                                                      struct process_info_v1 *infos) {
    struct process_info found[KE_PROCS_MAX];
    unsigned n = KE_PROCS_MAX, room = infos && count ? *count : 0;
    nvmlReturn_t rc = count ? processes(d, &n, found) : INVALID_ARGUMENT;
    if (rc) return rc;
    for (unsigned i = 0; i < n && i < room; i++) infos[i] = (struct process_info_v1){found[i].pid, found[i].used};
    *count = n;
    return n > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* Graphics programs and clients of MPS: there are none. */
#define NO_PROCESSES(name)                                                 \
    API nvmlReturn_t name(nvmlDevice_t d, unsigned *count, void *infos) {  \
        (void)infos;                                                       \
        return number_out(d, count, 0);                                    \
    }
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)
