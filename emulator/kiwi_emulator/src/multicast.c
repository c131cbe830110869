/* Multicast objects, as far as they hold memory: nothing can be mapped by them. Sparse arrays, which the emulated driver
 * does not have: their entries judge the handles that they get. */
#include <stdlib.h>

#include "emu.h"

struct bound {
    struct bound *next;
    struct ke_phys *phys;
    unsigned dev;
    uint64_t offset, size;
};

static struct group {
    struct group *next;
    CUmulticastObjectProp prop;
    uint64_t devices; /* a bit for each that was added */
    struct bound *bound;
} *groups; /* ke.mu */

static struct group *group_of(CUmemGenericAllocationHandle h) {
    struct group *g = groups;
    while (g && (uintptr_t)g != (uintptr_t)h) g = g->next;
    return g;
}

KE_ENTRY(cuMulticastCreate, (CUmemGenericAllocationHandle *out, const CUmulticastObjectProp *prop), (out, prop)) {
    if (!out || !prop || prop->flags) return CUDA_ERROR_INVALID_VALUE;
    if (!prop->numDevices || prop->numDevices > ke.device_count) return CUDA_ERROR_INVALID_VALUE;
    if (!prop->size || prop->size % KE_BIG_PAGE) return CUDA_ERROR_INVALID_VALUE;
    struct group *g = calloc(1, sizeof *g);
    if (!g) return CUDA_ERROR_OUT_OF_MEMORY;
    g->prop = *prop;
    ke_mu_lock();
    g->next = groups;
    groups = g;
    ke_mu_unlock();
    *out = (CUmemGenericAllocationHandle)(uintptr_t)g;
    return CUDA_SUCCESS;
}

KE_ENTRY(cuMulticastAddDevice, (CUmemGenericAllocationHandle h, CUdevice dev), (h, dev)) {
    if (dev < 0 || (unsigned)dev >= ke.device_count) return CUDA_ERROR_INVALID_DEVICE;
    ke_mu_lock();
    struct group *g = group_of(h);
    bool ok = g && !(g->devices >> dev & 1) && (unsigned)__builtin_popcountll(g->devices) < g->prop.numDevices;
    if (ok) g->devices |= 1ull << dev;
    ke_mu_unlock();
    return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Binds a part of the memory, which stays as long as it is bound. All devices must have been added. */
static CUresult bind(struct group *g, uint64_t offset, struct ke_phys *p, uint64_t from, uint64_t size,
                     unsigned long long flags) { /* ke.mu held */
    if (!g || !p || p->host || flags || !size || (offset | from | size) % KE_BIG_PAGE) return CUDA_ERROR_INVALID_VALUE;
    if ((unsigned)__builtin_popcountll(g->devices) < g->prop.numDevices || !(g->devices >> p->dev & 1))
        return CUDA_ERROR_INVALID_VALUE;
    if (from + size > p->size || offset + size > g->prop.size) return CUDA_ERROR_INVALID_VALUE;
    for (struct bound *b = g->bound; b; b = b->next)
        if (b->dev == p->dev && b->offset < offset + size && offset < b->offset + b->size) return CUDA_ERROR_INVALID_VALUE;
    struct bound *b = malloc(sizeof *b);
    if (!b) return CUDA_ERROR_OUT_OF_MEMORY;
    *b = (struct bound){g->bound, p, p->dev, offset, size};
    g->bound = b;
    p->refs++;
    return CUDA_SUCCESS;
}

static CUresult bind_memory(CUmemGenericAllocationHandle h, int dev, size_t offset, CUmemGenericAllocationHandle memory,
                            size_t from, size_t size, unsigned long long flags) {
    ke_mu_lock();
    struct ke_phys *p = ke_phys_of_handle(memory);
    CUresult rc = p && dev >= 0 && (unsigned)dev != p->dev ? CUDA_ERROR_INVALID_DEVICE
                                                           : bind(group_of(h), offset, p, from, size, flags);
    ke_mu_unlock();
    return rc;
}

static CUresult bind_address(CUmemGenericAllocationHandle h, int dev, size_t offset, CUdeviceptr at, size_t size,
                             unsigned long long flags) {
    ke_mu_lock();
    struct ke_map *m = ke_map_at(at);
    bool vmm = m && !m->ctx && m->addr + m->size - at >= size;
    CUresult rc = m && dev >= 0 && (unsigned)dev != m->phys->dev
                      ? CUDA_ERROR_INVALID_DEVICE
                      : bind(group_of(h), offset, vmm ? m->phys : NULL, vmm ? at - m->addr : 0, size, flags);
    ke_mu_unlock();
    return rc;
}

KE_ENTRY(cuMulticastBindMem,
         (CUmemGenericAllocationHandle h, size_t offset, CUmemGenericAllocationHandle memory, size_t from, size_t size,
          unsigned long long flags),
         (h, offset, memory, from, size, flags)) {
    return bind_memory(h, -1, offset, memory, from, size, flags);
}
KE_ENTRY(cuMulticastBindMem_v2,
         (CUmemGenericAllocationHandle h, CUdevice dev, size_t offset, CUmemGenericAllocationHandle memory, size_t from,
          size_t size, unsigned long long flags),
         (h, dev, offset, memory, from, size, flags)) {
    return dev < 0 ? CUDA_ERROR_INVALID_DEVICE : bind_memory(h, dev, offset, memory, from, size, flags);
}
KE_ENTRY(cuMulticastBindAddr,
         (CUmemGenericAllocationHandle h, size_t offset, CUdeviceptr at, size_t size, unsigned long long flags),
         (h, offset, at, size, flags)) {
    return bind_address(h, -1, offset, at, size, flags);
}
KE_ENTRY(cuMulticastBindAddr_v2,
         (CUmemGenericAllocationHandle h, CUdevice dev, size_t offset, CUdeviceptr at, size_t size,
          unsigned long long flags),
         (h, dev, offset, at, size, flags)) {
    return dev < 0 ? CUDA_ERROR_INVALID_DEVICE : bind_address(h, dev, offset, at, size, flags);
}

KE_ENTRY(cuMulticastUnbind, (CUmemGenericAllocationHandle h, CUdevice dev, size_t offset, size_t size),
         (h, dev, offset, size)) {
    ke_mu_lock();
    struct group *g = group_of(h);
    struct bound **at = g ? &g->bound : NULL, *b = NULL;
    while (at && (b = *at) && ((int)b->dev != dev || b->offset != offset || b->size != size)) at = &b->next;
    if (b) {
        *at = b->next;
        ke_phys_unref(b->phys);
        free(b);
    }
    ke_mu_unlock();
    return b ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

bool ke_group_release(CUmemGenericAllocationHandle h) {
    struct group **at = &groups, *g;
    while ((g = *at) && (uintptr_t)g != (uintptr_t)h) at = &g->next;
    if (!g) return false;
    *at = g->next;
    for (struct bound *b; (b = g->bound);) {
        g->bound = b->next;
        ke_phys_unref(b->phys);
        free(b);
    }
    free(g);
    return true;
}

/* ---- sparse arrays ---- */

static CUresult map_arrays(CUarrayMapInfo *list, unsigned count) {
    CUresult rc = list && count ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    for (unsigned i = 0; list && i < count; i++) {
        bool maps = (int)list[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP;
        if (maps && !ke_phys_of_handle(list[i].memHandle.memHandle)) rc = CUDA_ERROR_INVALID_VALUE;
    }
    ke_mu_unlock();
    return rc;
}

KE_ENTRY(cuMemMapArrayAsync, (CUarrayMapInfo *list, unsigned count, CUstream stream), (list, count, stream)) {
    (void)stream;
    return map_arrays(list, count);
}
