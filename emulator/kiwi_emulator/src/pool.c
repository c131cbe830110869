/* Stream-ordered allocation. Memory is taken at the request and given back when the stream reaches the free; nothing
 * is cached, as with a release threshold of 0 in real pools. */
#include <stdlib.h>
#include <string.h>

#include "emu.h"

#define MAGIC 0x900cu

static CUresult check(CUmemoryPool p) {
    return p && p->magic == MAGIC ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult alloc(CUdeviceptr *out, size_t size, CUmemoryPool pool, CUstream handle) {
    CUstream s;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc == CUDA_SUCCESS) rc = ke_capture_refuse(s, CUDA_ERROR_NOT_SUPPORTED); /* graph memory */
    if (rc != CUDA_SUCCESS) return rc;
    if (!pool) pool = ke.devices[s->ctx->dev].current_pool;
    if ((rc = check(pool)) != CUDA_SUCCESS) return rc;
    if (size == 0 && out) { /* allowed, unlike in cuMemAlloc */
        *out = 0;
        return CUDA_SUCCESS;
    }
    for (int attempt = 0; attempt < 2; attempt++) {
        ke_mu_lock();
        rc = ke_alloc(s->ctx, pool, size, out);
        ke_mu_unlock();
        if (rc != CUDA_ERROR_OUT_OF_MEMORY) break;
        ke_wait_context(NULL); /* memory that queued work will free counts as free */
    }
    return rc;
}
KE_FORWARD(cuMemAllocAsync, (CUdeviceptr *dptr, size_t bytesize, CUstream hStream),
           alloc(dptr, bytesize, NULL, hStream))
KE_FORWARD(cuMemAllocFromPoolAsync, (CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream),
           pool ? alloc(dptr, bytesize, pool, hStream) : CUDA_ERROR_INVALID_VALUE)

static CUresult run_free(CUcontext ctx, void *arg) {
    (void)ctx;
    ke_mu_lock();
    ke_free(*(CUdeviceptr *)arg);
    ke_mu_unlock();
    return CUDA_SUCCESS;
}

KE_ENTRY(cuMemFreeAsync, (CUdeviceptr addr, CUstream handle), (addr, handle)) {
    CUstream s;
    if (addr == 0) return CUDA_SUCCESS;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc == CUDA_SUCCESS) rc = ke_capture_refuse(s, CUDA_ERROR_NOT_SUPPORTED);
    if (rc != CUDA_SUCCESS) return rc;
    ke_mu_lock();
    struct ke_map *m = ke_map_at(addr);
    bool known = m && m->addr == addr && m->ctx;
    ke_mu_unlock();
    return known ? ke_submit(s, run_free, &addr, sizeof addr, 0) : CUDA_ERROR_INVALID_VALUE;
}

/* ---- pools ---------------------------------------------------------------------------------------- */

KE_ENTRY(cuMemPoolCreate, (CUmemoryPool *out, const CUmemPoolProps *props), (out, props)) {
    if (!out || !props) return CUDA_ERROR_INVALID_VALUE;
    int id = props->location.id;
    if ((int)props->location.type != CU_MEM_LOCATION_TYPE_DEVICE || props->handleTypes != 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (id < 0 || (unsigned)id >= ke.device_count) return CUDA_ERROR_INVALID_DEVICE;
    CUmemoryPool p = calloc(1, sizeof *p);
    if (!p) return CUDA_ERROR_OUT_OF_MEMORY;
    *p = (struct CUmemPoolHandle_st){.magic = MAGIC, .dev = (unsigned)id, .reuse = {1, 1, 1}};
    *out = p;
    return CUDA_SUCCESS;
}

/* Destroys a handle. Allocations may outlive the handle, so the struct stays. */
KE_ENTRY(cuMemPoolDestroy, (CUmemoryPool p), (p)) {
    CUresult rc = check(p);
    if (rc != CUDA_SUCCESS || p->is_default) return CUDA_ERROR_INVALID_VALUE;
    struct ke_device *d = &ke.devices[p->dev];
    if (d->current_pool == p) d->current_pool = &d->default_pool;
    p->magic = 0;
    return CUDA_SUCCESS;
}

enum { DEFAULT_POOL, CURRENT_POOL };

static CUresult device_pool(CUmemoryPool *out, CUdevice dev, int which) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (dev < 0 || (unsigned)dev >= ke.device_count) return CUDA_ERROR_INVALID_DEVICE;
    struct ke_device *d = &ke.devices[dev];
    *out = which == DEFAULT_POOL ? &d->default_pool : d->current_pool;
    return CUDA_SUCCESS;
}
KE_FORWARD(cuDeviceGetDefaultMemPool, (CUmemoryPool *pool_out, CUdevice dev), device_pool(pool_out, dev, DEFAULT_POOL))
KE_FORWARD(cuDeviceGetMemPool, (CUmemoryPool *pool, CUdevice dev), device_pool(pool, dev, CURRENT_POOL))

static CUresult located_pool(CUmemoryPool *out, const CUmemLocation *where, CUmemAllocationType type,
                             int which) {
    if (!where) return CUDA_ERROR_INVALID_VALUE;
    if ((int)where->type != CU_MEM_LOCATION_TYPE_DEVICE || (int)type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_NOT_SUPPORTED;
    return device_pool(out, where->id, which);
}
KE_FORWARD(cuMemGetDefaultMemPool, (CUmemoryPool *pool_out, CUmemLocation *location, CUmemAllocationType type),
           located_pool(pool_out, location, type, DEFAULT_POOL))
KE_FORWARD(cuMemGetMemPool, (CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type),
           located_pool(pool, location, type, CURRENT_POOL))

KE_ENTRY(cuDeviceSetMemPool, (CUdevice dev, CUmemoryPool p), (dev, p)) {
    if (dev < 0 || (unsigned)dev >= ke.device_count) return CUDA_ERROR_INVALID_DEVICE;
    if (check(p) != CUDA_SUCCESS || p->dev != (unsigned)dev) return CUDA_ERROR_INVALID_VALUE;
    ke.devices[dev].current_pool = p;
    return CUDA_SUCCESS;
}

KE_ENTRY(cuMemPoolTrimTo, (CUmemoryPool p, size_t kept_bytes), (p, kept_bytes)) {
    (void)kept_bytes; /* nothing is cached */
    return check(p);
}

static CUresult get_attribute(CUmemoryPool p, int what, void *out) {
    if (check(p) != CUDA_SUCCESS || !out) return CUDA_ERROR_INVALID_VALUE;
    if (what >= CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES &&
        what <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES)
        *(int *)out = p->reuse[what - 1];
    else if (what == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        *(cuuint64_t *)out = p->release_threshold;
    else if (what >= CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT && what <= CU_MEMPOOL_ATTR_USED_MEM_HIGH)
        *(cuuint64_t *)out = what % 2 ? p->used : p->used_high; /* attributes of current values are odd */
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}
KE_FORWARD(cuMemPoolGetAttribute, (CUmemoryPool pool, CUmemPool_attribute attr, void *value),
           get_attribute(pool, (int)attr, value))

static CUresult set_attribute(CUmemoryPool p, int what, const void *value) {
    if (check(p) != CUDA_SUCCESS || !value) return CUDA_ERROR_INVALID_VALUE;
    if (what >= CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES &&
        what <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES)
        p->reuse[what - 1] = *(const int *)value;
    else if (what == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        p->release_threshold = *(const cuuint64_t *)value;
    else if (what == CU_MEMPOOL_ATTR_USED_MEM_HIGH || what == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT + 1)
        p->used_high = p->used; /* only a reset is allowed */
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}
KE_FORWARD(cuMemPoolSetAttribute, (CUmemoryPool pool, CUmemPool_attribute attr, void *value),
           set_attribute(pool, (int)attr, value))

KE_ENTRY(cuMemPoolSetAccess, (CUmemoryPool p, const CUmemAccessDesc *map, size_t count), (p, map, count)) {
    if (check(p) != CUDA_SUCCESS || (count && !map)) return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS; /* the devices share one address space */
}

KE_ENTRY(cuMemPoolGetAccess, (CUmemAccess_flags *flags, CUmemoryPool p, CUmemLocation *where), (flags, p, where)) {
    if (!flags || !where || check(p) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
    *flags = (unsigned)where->id == p->dev ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                           : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}
