/* Pinned host memory, and attributes of pointers. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emu.h"

struct pinned {
    struct pinned *next;
    char *base;
    size_t size;
    bool ours; /* allocated here, not only registered */
    unsigned flags;
    CUcontext ctx;
};
static struct pinned *all;

static struct pinned *pinned_at(const void *p) {
    for (struct pinned *h = all; h; h = h->next) {
        if ((const char *)p >= h->base && (const char *)p < h->base + h->size) return h;
    }
    return NULL;
}

bool ke_host_pinned(const void *p, size_t n) {
    struct pinned *h = pinned_at(p);
    return h && (size_t)(h->base + h->size - (const char *)p) >= n;
}

bool ke_host_range(const void *p, void **base, size_t *size) {
    struct pinned *h = pinned_at(p);
    if (h) *base = h->base, *size = h->size;
    return h != NULL;
}

static CUresult add(void *base, size_t size, bool ours, unsigned flags, CUcontext ctx) {
    struct pinned *h = malloc(sizeof *h);
    if (!h) return CUDA_ERROR_OUT_OF_MEMORY;
    *h = (struct pinned){all, base, size, ours, flags, ctx};
    all = h;
    return CUDA_SUCCESS;
}

static CUresult alloc(void **out, size_t size, unsigned flags) {
    CUcontext ctx;
    if (!out || size == 0) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = ke_current(&ctx);
    if (rc != CUDA_SUCCESS) return rc;
    size = (size + KE_PAGE - 1) / KE_PAGE * KE_PAGE;
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    ke_mu_lock();
    rc = add(p, size, true, flags, ctx);
    ke_mu_unlock();
    if (rc == CUDA_SUCCESS) *out = p;
    else munmap(p, size);
    return rc;
}
KE_API CUresult cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags) {
    KE_CALL_UNSAFE(alloc(pp, bytesize, Flags));
}
KE_API CUresult cuMemAllocHost_v2(void **pp, size_t bytesize) { KE_CALL_UNSAFE(alloc(pp, bytesize, 0)); }

static CUresult drop(void *p, bool ours) {
    CUcontext ctx;
    CUresult rc = ke_current(&ctx);
    if (rc != CUDA_SUCCESS) return rc;
    ke_wait_context(NULL); /* a queued copy may still use it */
    rc = ours ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    ke_mu_lock();
    for (struct pinned **at = &all; *at; at = &(*at)->next) {
        struct pinned *h = *at;
        if (h->base != p || h->ours != ours) continue;
        *at = h->next;
        if (ours) munmap(h->base, h->size);
        free(h);
        rc = CUDA_SUCCESS;
        break;
    }
    ke_mu_unlock();
    return rc;
}
KE_API CUresult cuMemFreeHost(void *p) { KE_CALL_UNSAFE(drop(p, true)); }
KE_API CUresult cuMemHostUnregister(void *p) { KE_CALL_UNSAFE(drop(p, false)); }

KE_ENTRY_UNSAFE(cuMemHostRegister_v2, (void *p, size_t size, unsigned flags), (p, size, flags)) {
    CUcontext ctx;
    if (!p || size == 0) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = ke_current(&ctx);
    if (rc != CUDA_SUCCESS) return rc;
    ke_mu_lock();
    for (struct pinned *h = all; h && rc == CUDA_SUCCESS; h = h->next) {
        if ((char *)p < h->base + h->size && h->base < (char *)p + size)
            rc = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    if (rc == CUDA_SUCCESS) rc = add(p, size, false, flags, ctx);
    ke_mu_unlock();
    return rc;
}

KE_ENTRY(cuMemHostGetDevicePointer_v2, (CUdeviceptr *out, void *p, unsigned flags), (out, p, flags)) {
    (void)flags;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    bool known = pinned_at(p) != NULL;
    ke_mu_unlock();
    *out = known ? (CUdeviceptr)(uintptr_t)p : 0;
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

KE_ENTRY(cuMemHostGetFlags, (unsigned *flags, void *p), (flags, p)) {
    if (!flags) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    struct pinned *h = pinned_at(p);
    if (h) *flags = h->flags;
    ke_mu_unlock();
    return h ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- pointer attributes --------------------------------------------------------------------------- */

static unsigned access_flags(const struct ke_map *m) {
    if (!m || m->prot & PROT_WRITE) return CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE; /* host memory, too */
    return m->prot & PROT_READ ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READ : CU_POINTER_ATTRIBUTE_ACCESS_FLAG_NONE;
}

/* Gets an attribute of the memory behind the address, rather than of the allocation. */
static CUresult mapping_attribute(void *out, int what, CUdeviceptr p, const struct ke_map *m,
                                  const struct pinned *h) {
    bool there = m || h;
    switch (what) {
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        *(unsigned *)out = there ? access_flags(m) : CU_POINTER_ATTRIBUTE_ACCESS_FLAG_NONE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: *(size_t *)out = m ? m->size : h ? h->size : 0; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        *(CUdeviceptr *)out = m ? m->addr : h ? (CUdeviceptr)(uintptr_t)h->base : p;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        *(unsigned long long *)out = m ? m->phys->offset / KE_PAGE + 1 : 0; /* offsets are never reused */
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_LOCALITY_DOMAIN_ORDINAL: *(int *)out = -1; return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

/* Gets an attribute; ke.mu held. Attributes of an unknown pointer are refused, or zero in the plural call. */
static CUresult attribute(void *out, int what, CUdeviceptr p) {
    struct ke_map *m = ke_map_at(p);
    struct pinned *h = m ? NULL : pinned_at((void *)(uintptr_t)p);
    struct ke_range *r = ke_range_at(p);
    if (what == CU_POINTER_ATTRIBUTE_MAPPED) {
        *(unsigned char *)out = m || h;
        return CUDA_SUCCESS;
    }
    if (!m && !h && !(r && r->vmm)) return CUDA_ERROR_INVALID_VALUE;
    switch (what) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        if (m && !m->ctx) return CUDA_ERROR_INVALID_VALUE; /* VMM memory belongs to no context */
        *(CUcontext *)out = m ? m->ctx : h ? h->ctx : NULL;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)out = h ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = p; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (!h) return CUDA_ERROR_INVALID_VALUE;
        *(void **)out = (void *)(uintptr_t)p;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)out = m ? m->id : 1; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)out = 0; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(uint64_t *)out = 0; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)out = m ? (int)m->phys->dev : h ? (int)h->ctx->dev : 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)out = h ? (CUdeviceptr)(uintptr_t)h->base : r ? r->addr : p;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)out = h ? h->size : m && m->asked ? m->asked : r ? r->size : 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUmemoryPool *)out = m ? m->pool : NULL;
        return CUDA_SUCCESS;
    default: return mapping_attribute(out, what, p, m, h);
    }
}

KE_ENTRY(cuPointerGetAttribute, (void *out, CUpointer_attribute what, CUdeviceptr p), (out, what, p)) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    CUresult rc = attribute(out, (int)what, p);
    ke_mu_unlock();
    return rc;
}

static void clear(void *out, int what) {
    bool wide = what == CU_POINTER_ATTRIBUTE_CONTEXT || what == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ||
                what == CU_POINTER_ATTRIBUTE_HOST_POINTER || what == CU_POINTER_ATTRIBUTE_BUFFER_ID ||
                what == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR || what == CU_POINTER_ATTRIBUTE_RANGE_SIZE ||
                what == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES || what == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE ||
                what == CU_POINTER_ATTRIBUTE_MAPPING_SIZE || what == CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR ||
                what == CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID;
    if (what == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)out = -2; /* as the real driver answers */
    else if (what == CU_POINTER_ATTRIBUTE_LOCALITY_DOMAIN_ORDINAL) *(int *)out = -1;
    else memset(out, 0, wide ? 8 : what == CU_POINTER_ATTRIBUTE_MAPPED ? 1 : 4);
}

KE_ENTRY(cuPointerGetAttributes, (unsigned n, CUpointer_attribute *what, void **out, CUdeviceptr p),
         (n, what, out, p)) {
    if (!what || !out) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    for (unsigned i = 0; i < n; i++) {
        if (out[i] && attribute(out[i], (int)what[i], p) != CUDA_SUCCESS) clear(out[i], (int)what[i]);
    }
    ke_mu_unlock();
    return CUDA_SUCCESS;
}
