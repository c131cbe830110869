/* Run under the address and undefined-behaviour sanitizers: several threads allocate, copy, launch,
 * use streams, events and the VMM calls, while another suspends and resumes the process. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cu.h"
#include "emu.h"

#define CHECK(call)                                                                  \
    do {                                                                             \
        CUresult rc_ = (call);                                                       \
        if (rc_) fprintf(stderr, "%s:%d: %s = %d\n", __FILE__, __LINE__, #call, rc_), abort(); \
    } while (0)

CUresult cuInit(unsigned);
CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemAllocAsync(CUdeviceptr *, size_t, CUstream);
CUresult cuMemFreeAsync(CUdeviceptr, CUstream);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr, const void *, size_t, CUstream);
CUresult cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t);
CUresult cuMemHostAlloc(void **, size_t, unsigned);
CUresult cuMemFreeHost(void *);
CUresult cuStreamCreate(CUstream *, unsigned);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuStreamSynchronize(CUstream);
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned);
CUresult cuEventCreate(CUevent *, unsigned);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventDestroy_v2(CUevent);
CUresult cuModuleLoadData(CUmodule *, const void *);
CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        CUstream, void **, void **);
CUresult cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
CUresult cuMemAddressReserve(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
CUresult cuMemUnmap(CUdeviceptr, size_t);
CUresult cuMemRelease(CUmemGenericAllocationHandle);
CUresult cuMemAddressFree(CUdeviceptr, size_t);
CUresult cuCheckpointProcessLock(int, CUcheckpointLockArgs *);
CUresult cuCheckpointProcessCheckpoint(int, CUcheckpointCheckpointArgs *);
CUresult cuCheckpointProcessRestore(int, CUcheckpointRestoreArgs *);
CUresult cuCheckpointProcessUnlock(int, CUcheckpointUnlockArgs *);

enum { THREADS = 3, ROUNDS = 60, SWAPS = 12, WORDS = 64 << 10 };
static CUcontext context;

static void once(CUfunction add, unsigned seed) {
    CUdeviceptr p, q;
    CUstream a, b;
    CUevent e;
    uint32_t *host, one = 1;
    uint64_t n = WORDS;
    CHECK(cuStreamCreate(&a, seed & 1));
    CHECK(cuStreamCreate(&b, 1));
    CHECK(cuEventCreate(&e, 0));
    CHECK(cuMemHostAlloc((void **)&host, WORDS * 4, 0));
    for (unsigned i = 0; i < WORDS; i++) host[i] = seed * 7919 + i;
    CHECK(cuMemAlloc_v2(&p, WORDS * 4));
    CHECK(cuMemAllocAsync(&q, WORDS * 4, a));
    CHECK(cuMemFreeAsync(q, a));
    CHECK(cuMemcpyHtoDAsync_v2(p, host, WORDS * 4, a));
    CHECK(cuEventRecord(e, a));
    CHECK(cuStreamWaitEvent(b, e, 0));
    void *params[] = {&p, &n, &one};
    CHECK(cuLaunchKernel(add, 1, 1, 1, 1, 1, 1, 0, b, params, NULL));
    CHECK(cuStreamSynchronize(b));
    uint32_t *back = malloc(WORDS * 4);
    CHECK(cuMemcpyDtoH_v2(back, p, WORDS * 4));
    for (unsigned i = 0; i < WORDS; i++) {
        if (back[i] != host[i] + 1) abort();
    }
    free(back);
    CHECK(cuMemFree_v2(p));
    CHECK(cuMemFreeHost(host));
    CHECK(cuEventDestroy_v2(e));
    CHECK(cuStreamDestroy_v2(a));
    CHECK(cuStreamDestroy_v2(b));
}

static void map_once(void) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemAccessDesc access = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    CHECK(cuMemAddressReserve(&at, 2 * KE_BIG_PAGE, 0, 0, 0));
    CHECK(cuMemCreate(&handle, KE_BIG_PAGE, &prop, 0));
    CHECK(cuMemMap(at, KE_BIG_PAGE, 0, handle, 0));
    CHECK(cuMemMap(at + KE_BIG_PAGE, KE_BIG_PAGE, 0, handle, 0));
    CHECK(cuMemSetAccess(at, 2 * KE_BIG_PAGE, &access, 1));
    CHECK(cuMemRelease(handle));
    CHECK(cuMemUnmap(at, 2 * KE_BIG_PAGE));
    CHECK(cuMemAddressFree(at, 2 * KE_BIG_PAGE));
}

static void *work(void *arg) {
    CUmodule module;
    CUfunction add;
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module, "kiwi-emulated-module"));
    CHECK(cuModuleGetFunction(&add, module, "add_u32"));
    for (unsigned i = 0; i < ROUNDS; i++) {
        once(add, (unsigned)(uintptr_t)arg * 1000 + i);
        map_once();
    }
    return NULL;
}

static void *swap(void *arg) {
    int pid = getpid();
    for (int i = 0; i < SWAPS; i++) {
        CHECK(cuCheckpointProcessLock(pid, NULL));
        CHECK(cuCheckpointProcessCheckpoint(pid, NULL));
        CHECK(cuCheckpointProcessRestore(pid, NULL));
        CHECK(cuCheckpointProcessUnlock(pid, NULL));
        usleep(20000);
    }
    return arg;
}

int main(void) {
    pthread_t threads[THREADS + 1];
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, (void *)i);
    pthread_create(&threads[THREADS], NULL, swap, NULL);
    for (int i = 0; i <= THREADS; i++) pthread_join(threads[i], NULL);
    pid_t child = fork();
    if (child == 0) _exit(cuInit(0) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) abort();
    CHECK(cuDevicePrimaryCtxRelease_v2(0));
    if (ke.slot->device_bytes[0] || ke.slot->context_bytes[0]) abort();
    puts("clean");
    return 0;
}
