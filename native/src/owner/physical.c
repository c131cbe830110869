/* Maps physical memory to addresses through the driver's virtual memory management. */
#include <stdlib.h>
#include <string.h>

#include "base/real.h"
#include "base/tested.h"
#include "owner/blocks.h"

#define MIB (1ull << 20)
#define GIB (1ull << 30)
/* A handle costs about 0.16 ms whatever its size, and memory moves handle by handle: handles should be
 * neither too many nor too large. 80 GiB make 320 handles of 256 MiB. */
#define HANDLES_PER_GPU 256
#define CHUNK_MAX_BYTES (256 * MIB)
#define CHUNK_MIN_BYTES (64 * MIB) /* on GPUs of 4 GiB and more */

struct kp_gpu kp_gpu;

static CUmemAllocationProp properties(void) {
    CUmemAllocationProp prop;
    memset(&prop, 0, sizeof prop);
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = kp_gpu.device;
    prop.allocFlags.gpuDirectRDMACapable = kp_gpu.rdma;
    return prop;
}

static size_t chunk_bytes(size_t total) {
    size_t want = kp_gpu.granularity;
    while (want * 2 <= total / HANDLES_PER_GPU && want < CHUNK_MAX_BYTES) want *= 2;
    if (total >= 4 * GIB && want < CHUNK_MIN_BYTES) want = CHUNK_MIN_BYTES;
    return want;
}

static int attribute(CUdevice_attribute what, CUdevice device) {
    int value = 0;
    return kp_real.cuDeviceGetAttribute(&value, what, device) == CUDA_SUCCESS ? value : 0;
}

static bool has_all_calls(void) { /* CUDA 10.2 and later have them */
    return kp_real.cuMemCreate && kp_real.cuMemMap && kp_real.cuMemUnmap && kp_real.cuMemRelease &&
           kp_real.cuMemSetAccess && kp_real.cuMemAddressReserve && kp_real.cuMemAddressFree &&
           kp_real.cuMemGetAllocationGranularity && kp_real.cuThreadExchangeStreamCaptureMode;
}

static void learn(CUdevice device) {
    size_t total = 0;
    kp_gpu.device = device;
    if (!has_all_calls()) return;
    kp_gpu.rdma = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device) != 0;
    bool vmm = attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) != 0;
    CUmemAllocationProp prop = properties();
    vmm = vmm && kp_real.cuDeviceTotalMem_v2(&total, device) == CUDA_SUCCESS;
    vmm = vmm && kp_real.cuMemGetAllocationGranularity(&kp_gpu.granularity, &prop,
                                                       CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) == CUDA_SUCCESS;
    kp_gpu.usable = vmm && kp_gpu.granularity != 0;
    kp_gpu.total_bytes = total;
    if (kp_gpu.usable) kp_gpu.chunk_bytes = chunk_bytes(total);
}

void kp_gpu_learn(CUdevice device) {
    static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
    if (__atomic_load_n(&kp_gpu.known, __ATOMIC_ACQUIRE)) return;
    pthread_mutex_lock(&mu);
    if (!kp_gpu.known) {
        learn(device);
        __atomic_store_n(&kp_gpu.known, true, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&mu);
}

/* Maps new memory. The handle is released at once: the mapping keeps the memory, and unmapping frees it. */
CUresult kp_physical_map(CUdeviceptr at, size_t bytes) {
    CUmemAllocationProp prop = properties();
    CUmemGenericAllocationHandle handle;
    if (kp_fault(KP_FAULT_CREATE)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = kp_real.cuMemCreate(&handle, bytes, &prop, 0);
    if (rc != CUDA_SUCCESS) return rc;
    rc = kp_fault(KP_FAULT_MAP) ? CUDA_ERROR_MAP_FAILED : kp_real.cuMemMap(at, bytes, 0, handle, 0);
    kp_real.cuMemRelease(handle);
    return rc;
}

CUresult kp_physical_access(CUdeviceptr at, size_t bytes) {
    CUmemAccessDesc access[64];
    size_t n = 0;
    memset(access, 0, sizeof access);
    access[n].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[n].location.id = kp_gpu.device;
    access[n++].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    for (int d = 0; d < 64 && n < 64; d++) {
        if (!(kp_gpu.peers >> d & 1) || d == kp_gpu.device) continue;
        access[n] = access[0];
        access[n++].location.id = d;
    }
    return kp_real.cuMemSetAccess(at, bytes, access, n);
}

CUresult kp_physical_unmap(CUdeviceptr at, size_t bytes) {
    return kp_fault(KP_FAULT_UNMAP) ? CUDA_ERROR_UNKNOWN : kp_real.cuMemUnmap(at, bytes);
}

/* ---- blocks -------------------------------------------------------------------------------------- */

static struct kp_block *lay_out(struct kp_ctx *ctx, size_t asked) {
    size_t g = kp_gpu.granularity, bytes = (asked + g - 1) / g * g, each = kp_gpu.chunk_bytes;
    size_t n = (bytes + each - 1) / each;
    struct kp_block *b = calloc(1, sizeof *b + n * sizeof b->chunks[0]);
    if (!b) return NULL;
    b->ctx = ctx;
    b->bytes = bytes;
    b->chunk_count = (unsigned)n;
    for (size_t i = 0; i < n; i++) b->chunks[i].bytes = i + 1 < n ? each : bytes - i * each;
    return b;
}

/* Makes a whole block, or nothing; the block is not yet in the table. OUT_OF_MEMORY means GPU memory: if the
 * process has no memory or addresses left, room in the GPU would not help, and the driver's own call says what
 * is wrong. */
CUresult kp_block_make(struct kp_ctx *ctx, size_t asked, struct kp_block **out) {
    if (asked > kp_gpu.total_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    struct kp_block *b = lay_out(ctx, asked);
    if (!b) return CUDA_ERROR_MAP_FAILED;
    CUresult rc = kp_fault(KP_FAULT_RESERVE) ? CUDA_ERROR_OUT_OF_MEMORY
                                             : kp_real.cuMemAddressReserve(&b->addr, b->bytes, 0, 0, 0);
    if (rc != CUDA_SUCCESS) {
        free(b);
        return rc == CUDA_ERROR_OUT_OF_MEMORY ? CUDA_ERROR_MAP_FAILED : rc;
    }
    size_t done = 0;
    for (unsigned i = 0; i < b->chunk_count && rc == CUDA_SUCCESS; i++) {
        rc = kp_physical_map(b->addr + done, b->chunks[i].bytes);
        if (rc == CUDA_SUCCESS) done += b->chunks[i].bytes;
    }
    if (rc == CUDA_SUCCESS) rc = kp_physical_access(b->addr, b->bytes);
    if (rc != CUDA_SUCCESS) {
        CUdeviceptr at = b->addr;
        for (unsigned i = 0; at < b->addr + done; at += b->chunks[i++].bytes)
            kp_real.cuMemUnmap(at, b->chunks[i].bytes);
        kp_real.cuMemAddressFree(b->addr, b->bytes);
        free(b);
        return rc;
    }
    kp_block_count(b, 1);
    kp_need_grew(b->bytes);
    *out = b;
    return CUDA_SUCCESS;
}

/* Records that a chunk has moved, in the chunk and in the books. */
void kp_bytes_moved(struct kp_chunk *c, enum kp_where to) {
    int64_t bytes = (int64_t)c->bytes;
    bool in = to == KP_IN;
    if ((c->where == KP_IN) != in) {
        kp_books_add(&kp_totals.resident, in ? bytes : -bytes);
        kp_books_add(&kp_totals.out, in ? -bytes : bytes);
    }
    __atomic_store_n(&c->where, to, __ATOMIC_RELEASE);
}

uint64_t kp_block_overhead(const struct kp_block *b) {
    size_t asked = b->asked;
    for (unsigned i = 0; i < b->slot_count; i++) asked += b->slots[i].asked;
    return b->chunk_count ? b->bytes - asked : 0;
}

void kp_block_count(const struct kp_block *b, int sign) {
    if (b->stays || !b->chunk_count) {
        if (b->foreign == KP_FOREIGN_IPC) kp_books_add(&kp_totals.shared, sign * (int64_t)b->bytes);
        kp_own_seen_foreign(b->foreign, sign * (int64_t)b->bytes);
        return;
    }
    kp_books_add(&kp_totals.owned, sign * (int64_t)b->bytes);
    for (unsigned i = 0; i < b->chunk_count; i++)
        kp_books_add(b->chunks[i].where == KP_IN ? &kp_totals.resident : &kp_totals.out,
                     sign * (int64_t)b->chunks[i].bytes);
}

void kp_block_end(struct kp_block *b) {
    CUdeviceptr at = b->addr;
    kp_block_count(b, -1);
    for (unsigned i = 0; i < b->chunk_count; at += b->chunks[i++].bytes) {
        struct kp_chunk *c = &b->chunks[i];
        if (c->where != KP_OUT) kp_real.cuMemUnmap(at, c->bytes);
        kp_arena_give(&c->copy);
    }
    if (b->chunk_count) kp_real.cuMemAddressFree(b->addr, b->bytes);
    free(b->slots);
    free(b);
}
