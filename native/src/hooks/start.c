/* The start and state of the library in a process. A program that neither looks libcuda up nor is linked with it runs
 * none of this (bind.c has the only constructor), and nothing here can keep a program from starting. */
#define _GNU_SOURCE
#include "hooks/start.h"

#include <pthread.h>
#include <stdlib.h>

#include "hooks/hooks.h"

#include "base/kiwi_preload.h"
#include "base/log.h"
#include "base/real.h"
#include "hooks/driver.h"
#include "link/link.h"

static bool initialised; /* this process, or the one that it was forked from, has initialised the driver */

/* Returns the version. If this function exists, Kiwi knows that the library is loaded. */
KP_API __attribute__((used)) const char *kiwi_preload_version(void) { return KP_VERSION; }

/* ---- fork ---- */

/* Prepares a child. The driver does not survive a fork: a child of a process that used the driver gets
 * NOT_INITIALIZED for every call, so there is nothing to gate or to own. A child of any other process is a
 * program like any other. In both cases this thread is the only one left. */
static void in_child(void) {
    kp_gate_reset();
    if (initialised) kp_disable();
}

static void prepare(void) {
    kp_at_fork(in_child);
    kp_gate_prepare();
}

void kp_driver_used(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare);
}

/* Returns 1 if nothing in this process can use the GPU without a call through this library, and no such call has
 * initialised the driver. Kiwi's kernel extension asks this before it runs a cell that may or may not use the
 * GPU. */
KP_API __attribute__((used)) int kiwi_preload_driver_untouched(void) {
    return !__atomic_load_n(&initialised, __ATOMIC_RELAXED) && !kp_disabled() && !kp_driver_bypassed();
}

void kp_driver_initialised(void) { __atomic_store_n(&initialised, true, __ATOMIC_RELAXED); }

/* ---- the link ---- */

static struct first_gpu { /* whose daemon the link speaks to, and whose memory may be owned */
    CUuuid uuid;
    int device;
} *first_gpu;

/* Sets the GPU of the link, once. */
static void name_gpu(int device) {
    struct first_gpu gpu = {.device = device}, *kept, *none = NULL;
    if (kp_disabled() || __atomic_load_n(&first_gpu, __ATOMIC_RELAXED)) return;
    if (!kp_real.cuDeviceGetUuid_v2 || kp_real.cuDeviceGetUuid_v2(&gpu.uuid, device) != CUDA_SUCCESS) return;
    if (!(kept = malloc(sizeof gpu))) return;
    *kept = gpu;
    if (!__atomic_compare_exchange_n(&first_gpu, &none, kept, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) free(kept);
}

void kp_context_before_create(int device) {
    if (kp_disabled()) return;
    if (!__atomic_load_n(&first_gpu, __ATOMIC_RELAXED)) {
        bool entered = kp_gate_enter_other();
        name_gpu(device);
        kp_gate_leave(entered);
    }
    kp_context_start_link();
}

void kp_context_created(int device) {
    name_gpu(device); /* unless it was named before */
    struct first_gpu *gpu = __atomic_load_n(&first_gpu, __ATOMIC_ACQUIRE);
    if (gpu && kp_owning()) kp_own_start(gpu->device);
}

/* Waits for the decision about the program's memory in every thread that comes before it has fallen: nobody may get
 * memory of the driver's while it is still open who owns it. */
void kp_context_start_link(void) {
    static bool started;
    struct first_gpu *gpu = __atomic_load_n(&first_gpu, __ATOMIC_ACQUIRE);
    bool first = gpu && !__atomic_exchange_n(&started, true, __ATOMIC_ACQ_REL);
    if (first) kp_link_start(&gpu->uuid);
    if (first || (gpu && !kp_own_decided())) kp_link_await();
}

void kp_context_found(void) {
    static bool looked;
    CUcontext context = NULL;
    CUdevice device;
    if (kp_disabled() || __atomic_load_n(&first_gpu, __ATOMIC_RELAXED)) return;
    if (__atomic_exchange_n(&looked, true, __ATOMIC_RELAXED)) return;
    /* Another thread may be filling the table a second time. */
    __typeof__(kp_real.cuCtxGetCurrent) current = __atomic_load_n(&kp_real.cuCtxGetCurrent, __ATOMIC_RELAXED);
    __typeof__(kp_real.cuCtxGetDevice) of_device = __atomic_load_n(&kp_real.cuCtxGetDevice, __ATOMIC_RELAXED);
    if (!current || current(&context) != CUDA_SUCCESS) return;
    kp_driver_initialised();
    if (!context || !of_device || of_device(&device) != CUDA_SUCCESS) return;
    name_gpu(device);
    kp_context_start_link();
    bool entered = kp_gate_enter_other();
    kp_context_created(device);
    kp_own_context_seen(context, device);
    kp_gate_leave(entered);
}

/* ---- calls for which no function of the driver was found ---- */

CUresult kp_missing(void) {
    if (kp_real_ready()) return CUDA_ERROR_NOT_FOUND; /* an older driver */
#ifdef KP_GATE
    return CUDA_ERROR_NO_DEVICE; /* as without the driver's kernel module */
#else
    kp_warn("a function of the CUDA driver was called, and no libcuda is loaded");
    return CUDA_ERROR_NOT_INITIALIZED;
#endif
}

void *kp_real_of(int symbol) {
    void *real = kp_symbol_real(&kp_symbols[symbol]);
    if (__builtin_expect(!real, 0) && kp_driver_find()) real = kp_symbol_real(&kp_symbols[symbol]);
    return real;
}

__thread struct kp_slow kp_slow __attribute__((tls_model("initial-exec")));

W kp_no_such_call(void **slot) {
    kp_driver_find();
    return __atomic_load_n(slot, __ATOMIC_RELAXED) ? 0 : (W)kp_missing();
}
