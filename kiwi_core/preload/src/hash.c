#include "hash.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda/hash_ptx.h"
#include "fault.h"
#include "keep.h"
#include "log.h"
#include "real.h"

#define THREADS 256
#define ROW_KEYS 2056
#define TRIED_LEAVES 2

struct kp_hasher { /* what a context needs to hash; ends with the context */
    CUmodule module;
    CUfunction function;
    CUdeviceptr keys;
    struct kp_digest *results; /* pinned: the GPU writes here */
    size_t room;               /* leaves */
};

static uint32_t keys[KP_HASH_KEY_BYTES / 4] __attribute__((aligned(16)));

static bool draw_keys(void) {
    static bool drawn;
    if (drawn) return true;
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    size_t got = 0;
    while (fd >= 0 && got < sizeof keys) {
        ssize_t n = read(fd, (char *)keys + got, sizeof keys - got);
        if (n <= 0) break;
        got += (size_t)n;
    }
    if (fd >= 0) close(fd);
    uint64_t *second = (uint64_t *)(keys + ROW_KEYS); /* below 2^61 - 1 */
    for (size_t i = 0; i < (sizeof keys - ROW_KEYS * 4) / 8; i++) {
        second[i] &= (1ull << 61) - 1;
        if (second[i] == (1ull << 61) - 1) second[i] = 0;
    }
    return drawn = got == sizeof keys;
}

bool kp_hash_ready(const struct kp_ctx *ctx) { return __atomic_load_n(&ctx->hasher, __ATOMIC_ACQUIRE) != NULL; }

bool kp_hash_ready_everywhere(void) {
    struct kp_ctx **list;
    size_t n = kp_ctx_hold_all(&list, true);
    bool ready = n > 0;
    for (size_t i = 0; i < n; i++) {
        ready = ready && kp_hash_ready(list[i]);
        kp_ctx_let_go(list[i]);
    }
    free(list);
    return ready;
}

const char *kp_hash_text(void) { return kp_hash_ptx; }

bool kp_hash_room(const struct kp_ctx *ctx, size_t first, size_t leaves) {
    return first + leaves <= ctx->hasher->room;
}

const struct kp_digest *kp_hash_result(const struct kp_ctx *ctx, size_t first) {
    return ctx->hasher->results + first;
}

static CUresult submit(const struct kp_hasher *h, CUstream stream, CUdeviceptr at, size_t first, size_t leaves) {
    CUdeviceptr results = (CUdeviceptr)(uintptr_t)(h->results + first), keys_at = h->keys;
    void *params[] = {&at, &results, &keys_at};
    return kp_real.cuLaunchKernel(h->function, (unsigned)leaves, 1, 1, THREADS, 1, 1, 0, stream, params, NULL);
}

CUresult kp_hash_submit(struct kp_ctx *ctx, CUdeviceptr at, size_t first, size_t leaves) {
    return submit(ctx->hasher, ctx->stream, at, first, leaves);
}

/* ---- loading it ----------------------------------------------------------------------------------- */

/* The GPU's answer for two leaves of noise, the second of which differs in one bit, must be the CPU's.
 * Nothing here is for the default stream: that would break the capture of a blocking one. */
static CUresult try(struct kp_hasher *h, CUdeviceptr data, uint32_t *host, bool *right) {
    CUstream stream;
    CUresult rc = kp_real.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    if (rc != CUDA_SUCCESS) return rc;
    size_t words = KP_LEAF_BYTES / 4;
    uint32_t x = keys[0] | 1;
    for (size_t i = 0; i < words; i++) {
        x ^= x << 13, x ^= x >> 17, x ^= x << 5;
        host[i] = host[i + words] = x;
    }
    host[words + keys[1] % words] ^= 1u << (keys[2] % 32);
    rc = kp_real.cuMemcpyHtoDAsync_v2(h->keys, keys, sizeof keys, stream);
    if (rc == CUDA_SUCCESS)
        rc = kp_real.cuMemcpyHtoDAsync_v2(data, host, TRIED_LEAVES * KP_LEAF_BYTES, stream);
    if (rc == CUDA_SUCCESS) rc = submit(h, stream, data, 0, TRIED_LEAVES);
    if (rc == CUDA_SUCCESS) rc = kp_real.cuStreamSynchronize(stream);
    kp_real.cuStreamDestroy_v2(stream);
    *right = rc == CUDA_SUCCESS;
    for (size_t i = 0; i < TRIED_LEAVES && *right; i++) {
        struct kp_digest d;
        kp_hash_leaf(host + i * words, keys, &d);
        *right = memcmp(&d, &h->results[i], sizeof d) == 0;
    }
    return rc;
}

static bool self_test(struct kp_hasher *h, CUresult *result) {
    CUdeviceptr data = 0;
    bool right = false;
    uint32_t *host = malloc(TRIED_LEAVES * KP_LEAF_BYTES);
    CUresult rc = host ? kp_real.cuMemAlloc_v2(&data, TRIED_LEAVES * KP_LEAF_BYTES) : CUDA_ERROR_OUT_OF_MEMORY;
    if (rc == CUDA_SUCCESS) rc = try(h, data, host, &right);
    if (data) kp_real.cuMemFree_v2(data);
    free(host);
    if (rc == CUDA_SUCCESS && !right)
        kp_warn("the GPU does not hash as the CPU does: unchanged memory will be copied again each time");
    *result = rc;
    return right;
}

static CUresult load(struct kp_hasher *h) {
    CUresult rc = kp_real.cuModuleLoadData(&h->module, kp_hash_ptx);
    if (rc != CUDA_SUCCESS) h->module = NULL;
    if (rc == CUDA_SUCCESS) rc = kp_real.cuModuleGetFunction(&h->function, h->module, "kiwi_hash_leaves");
    if (rc == CUDA_SUCCESS) rc = kp_real.cuMemAlloc_v2(&h->keys, sizeof keys);
    h->room = kp_gpu.total_bytes / KP_LEAF_BYTES + TRIED_LEAVES;
    if (rc == CUDA_SUCCESS)
        rc = kp_real.cuMemHostAlloc((void **)&h->results, h->room * sizeof *h->results, CU_MEMHOSTALLOC_PORTABLE);
    return rc;
}

static void unload(struct kp_hasher *h) {
    if (h->results) kp_real.cuMemFreeHost(h->results);
    if (h->keys) kp_real.cuMemFree_v2(h->keys);
    if (h->module) kp_real.cuModuleUnload(h->module);
}

void kp_hash_prepare(struct kp_ctx *ctx) {
    if (ctx->hash_tried || !kp_keep_wanted()) return;
    ctx->hash_tried = true;
    struct kp_hasher *h = calloc(1, sizeof *h);
    if (!h || kp_gpu.granularity % KP_LEAF_BYTES || !draw_keys() || kp_ctx_push(ctx) != CUDA_SUCCESS) {
        free(h);
        return;
    }
    CUresult rc = load(h);
    bool ok = rc == CUDA_SUCCESS && self_test(h, &rc);
    if (!ok) unload(h);
    kp_ctx_pop(ctx);
    ctx->hash_tried = rc != CUDA_ERROR_OUT_OF_MEMORY; /* a full GPU is tried again */
    if (rc != CUDA_SUCCESS) kp_note("no hash on this GPU (error %d): all memory is copied each time", (int)rc);
    if (ok) __atomic_store_n(&ctx->hasher, h, __ATOMIC_RELEASE);
    else free(h);
}
