/* Runs under the address and undefined-behaviour sanitizers: several threads allocate, copy, launch, and use
 * streams, events and the VMM calls, while another thread suspends and resumes the process. Before that, this
 * process moves a second one out and in. */
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
CUresult cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
CUresult cuStreamEndCapture(CUstream, CUgraph *);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *, CUgraph, unsigned long long);
CUresult cuGraphExecUpdate_v2(CUgraphExec, CUgraph, CUgraphExecUpdateResultInfo *);
CUresult cuGraphLaunch(CUgraphExec, CUstream);
CUresult cuGraphAddMemcpyNode(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const CUDA_MEMCPY3D *, CUcontext);
CUresult cuGraphDestroy(CUgraph);
CUresult cuUserObjectCreate(CUuserObject *, void *, CUhostFn, unsigned, unsigned);
CUresult cuGraphRetainUserObject(CUgraph, CUuserObject, unsigned, unsigned);
CUresult cuGraphExecDestroy(CUgraphExec);
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

CUresult cuMemcpyHtoD_v2(CUdeviceptr, const void *, size_t);
CUresult cuMemcpyDtoHAsync_v2(void *, CUdeviceptr, size_t, CUstream);

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

/* Captures two streams. */
static CUgraph capture(CUfunction add, CUstream s, CUstream side, CUdeviceptr p) {
    CUevent fork, join;
    CUgraph graph;
    uint32_t one = 1;
    uint64_t n = WORDS / 2;
    CUdeviceptr half = p + WORDS * 2;
    void *params[] = {&p, &n, &one}, *side_params[] = {&half, &n, &one};
    CHECK(cuEventCreate(&fork, 0));
    CHECK(cuEventCreate(&join, 0));
    CHECK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    CHECK(cuEventRecord(fork, s));
    CHECK(cuStreamWaitEvent(side, fork, 0));
    CHECK(cuLaunchKernel(add, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
    CHECK(cuLaunchKernel(add, 1, 1, 1, 1, 1, 1, 0, side, side_params, NULL));
    CHECK(cuEventRecord(join, side));
    CHECK(cuStreamWaitEvent(s, join, 0));
    CHECK(cuStreamEndCapture(s, &graph));
    CHECK(cuEventDestroy_v2(fork));
    CHECK(cuEventDestroy_v2(join));
    return graph;
}

static void bury(void *count) { __atomic_add_fetch((int *)count, 1, __ATOMIC_SEQ_CST); }

/* Runs a captured graph, and one that has it within; updates the first. */
static void replay(CUfunction add) {
    CUdeviceptr p, q;
    CUstream s, side;
    CUgraphExec once, twice;
    CUgraphNode node;
    CUgraphExecUpdateResultInfo info;
    static const uint32_t zero[WORDS];
    CHECK(cuMemAlloc_v2(&p, WORDS * 4));
    CHECK(cuMemAlloc_v2(&q, WORDS * 4));
    CHECK(cuMemcpyHtoD_v2(p, zero, sizeof zero));
    CHECK(cuStreamCreate(&s, 1));
    CHECK(cuStreamCreate(&side, 1));
    CUgraph graph = capture(add, s, side, p);
    CHECK(cuGraphInstantiateWithFlags(&once, graph, 0));
    CUgraph bigger = capture(add, s, side, p);
    CHECK(cuGraphAddChildGraphNode(&node, bigger, NULL, 0, graph));
    CUuserObject kept;
    int buried = 0;
    CHECK(cuUserObjectCreate(&kept, &buried, bury, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
    CHECK(cuGraphRetainUserObject(bigger, kept, 1, CU_GRAPH_USER_OBJECT_MOVE));
    CUDA_MEMCPY3D copy = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = p, .srcPitch = WORDS,
                          .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = q, .dstPitch = WORDS,
                          .WidthInBytes = WORDS, .Height = 4, .Depth = 1};
    CHECK(cuGraphAddMemcpyNode(&node, bigger, NULL, 0, &copy, NULL));
    CHECK(cuGraphInstantiateWithFlags(&twice, bigger, 0));
    CHECK(cuGraphExecUpdate_v2(once, graph, &info));
    CHECK(cuGraphDestroy(graph));
    CHECK(cuGraphDestroy(bigger));
    CHECK(cuGraphLaunch(once, s));
    CHECK(cuGraphLaunch(twice, s));
    CHECK(cuGraphLaunch(twice, side)); /* waits for the launch before, on the other stream */
    CHECK(cuGraphExecDestroy(twice));
    CHECK(cuStreamSynchronize(side));
    CHECK(cuGraphExecDestroy(once));
    while (!__atomic_load_n(&buried, __ATOMIC_SEQ_CST)) usleep(1000); /* the last holder runs the destructor */
    uint32_t *back = malloc(WORDS * 4);
    CHECK(cuMemcpyDtoH_v2(back, p, WORDS * 4));
    for (unsigned i = 0; i < WORDS; i++) {
        if (back[i] != 5) abort();
    }
    free(back);
    CHECK(cuMemFree_v2(p));
    CHECK(cuMemFree_v2(q));
    CHECK(cuStreamDestroy_v2(s));
    CHECK(cuStreamDestroy_v2(side));
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
        if (i % 4 == 0) replay(add);
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

enum { BLOCKS = 5 };

/* Reports that it is ready, waits until the process has been moved, and checks its memory. */
static void be_moved(int ready, int moved) {
    static uint32_t data[WORDS];
    CUdeviceptr block[BLOCKS];
    char byte = 0;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    for (unsigned b = 0; b < BLOCKS; b++) {
        for (unsigned i = 0; i < WORDS; i++) data[i] = b * 7919 + i;
        CHECK(cuMemAlloc_v2(&block[b], sizeof data));
        CHECK(cuMemcpyHtoD_v2(block[b], data, sizeof data));
    }
    if (write(ready, &byte, 1) != 1 || read(moved, &byte, 1) != 1) abort();
    for (unsigned b = 0; b < BLOCKS; b++) {
        CHECK(cuMemcpyDtoH_v2(data, block[b], sizeof data));
        for (unsigned i = 0; i < WORDS; i++) {
            if (data[i] != b * 7919 + i) abort();
        }
    }
    _exit(0);
}

static void move_from_here(int pid) {
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuCheckpointProcessLock(pid, NULL));
    for (int swap = 0; swap < SWAPS; swap++) {
        CHECK(cuCheckpointProcessCheckpoint(pid, NULL));
        CHECK(cuCheckpointProcessRestore(pid, NULL));
    }
    CHECK(cuCheckpointProcessUnlock(pid, NULL));
}

static pid_t start_target(int *ready, int *moved) { /* called before this process initialises CUDA */
    int up[2], down[2];
    if (pipe(up) || pipe(down)) abort();
    pid_t child = fork();
    if (child == 0) be_moved(up[1], down[0]);
    *ready = up[0], *moved = down[1];
    return child;
}

int main(void) {
    pthread_t threads[THREADS + 1];
    int ready, moved, ended;
    char byte = 0;
    pid_t target = start_target(&ready, &moved);
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    if (read(ready, &byte, 1) != 1) abort();
    move_from_here(target);
    if (write(moved, &byte, 1) != 1 || waitpid(target, &ended, 0) != target || ended != 0) abort();
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
