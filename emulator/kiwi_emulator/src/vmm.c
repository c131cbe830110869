/* Virtual memory management, with addresses, memory and access as three separate things. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emu.h"

/* Returns the memory of a handle. Handles are pointers to ke_phys, checked against the list. */
struct ke_phys *ke_phys_of_handle(CUmemGenericAllocationHandle h) {
    for (struct ke_phys *p = ke.phys; p; p = p->next) {
        if ((uintptr_t)p == (uintptr_t)h && p->handles) return p;
    }
    return NULL;
}

static CUresult check_prop(const CUmemAllocationProp *prop) {
    if (!prop || (int)prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    int id = prop->location.id;
    switch ((int)prop->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: break;
    case CU_MEM_LOCATION_TYPE_HOST: return prop->requestedHandleTypes ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA: return id ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; /* there is one node */
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: return CUDA_ERROR_INVALID_VALUE;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return id < 0 || (unsigned)id >= ke.device_count ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

KE_ENTRY(cuMemGetAllocationGranularity,
         (size_t *out, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option), (out, prop, option)) {
    (void)option;
    CUresult rc = check_prop(prop);
    if (!out) rc = CUDA_ERROR_INVALID_VALUE;
    if (rc == CUDA_SUCCESS) *out = KE_BIG_PAGE;
    return rc;
}

/* Makes host memory, which takes nothing of a GPU. */
static CUresult new_in_host(size_t size, struct ke_phys **out) {
    int file = memfd_create("kiwi-emulated-host", MFD_CLOEXEC);
    bool made = file >= 0 && ftruncate(file, (off_t)size) == 0;
    *out = made ? ke_phys_of_file(0, size, file) : NULL;
    if (*out) (*out)->host = true;
    else if (file >= 0) close(file);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

KE_ENTRY(cuMemCreate,
         (CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *prop, unsigned long long flags),
         (out, size, prop, flags)) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = check_prop(prop);
    if (rc != CUDA_SUCCESS) return rc;
    if (!out || size == 0 || size % KE_BIG_PAGE) return CUDA_ERROR_INVALID_VALUE;
    struct ke_phys *p;
    ke_mu_lock();
    bool device = (int)prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    rc = device ? ke_phys_new((unsigned)prop->location.id, size, &p) : new_in_host(size, &p);
    if (rc == CUDA_SUCCESS) {
        p->handles = 1;
        p->prop = *prop;
        *out = (CUmemGenericAllocationHandle)(uintptr_t)p;
    }
    ke_mu_unlock();
    return rc;
}

KE_ENTRY(cuMemRelease, (CUmemGenericAllocationHandle h), (h)) {
    ke_mu_lock();
    struct ke_phys *p = ke_phys_of_handle(h);
    if (p) {
        p->handles--;
        ke_phys_unref(p);
    }
    bool released = p || ke_group_release(h);
    ke_mu_unlock();
    return released ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

KE_ENTRY(cuMemAddressReserve, (CUdeviceptr *out, size_t size, size_t align, CUdeviceptr hint, unsigned long long flags),
         (out, size, align, hint, flags)) {
    (void)flags;
    if (!out || size == 0 || size % KE_BIG_PAGE) return CUDA_ERROR_INVALID_VALUE;
    if (align == 0) align = KE_BIG_PAGE;
    if (align & (align - 1)) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    *out = ke_range_reserve(size, align < KE_BIG_PAGE ? KE_BIG_PAGE : align, hint, true);
    ke_mu_unlock();
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static struct ke_map *first_map_in(CUdeviceptr addr, size_t size) {
    for (size_t i = 0; i < ke_map_count(); i++) {
        struct ke_map *m = ke_map_index(i);
        if (m->addr < addr + size && addr < m->addr + m->size) return m;
    }
    return NULL;
}

KE_ENTRY(cuMemAddressFree, (CUdeviceptr addr, size_t size), (addr, size)) {
    ke_mu_lock();
    struct ke_range *r = ke_range_at(addr);
    CUresult rc = CUDA_SUCCESS;
    if (!r || !r->vmm || r->addr != addr || r->size != size || first_map_in(addr, size))
        rc = CUDA_ERROR_INVALID_VALUE;
    else
        ke_range_drop(r);
    ke_mu_unlock();
    return rc;
}

KE_ENTRY(cuMemMap,
         (CUdeviceptr addr, size_t size, size_t offset, CUmemGenericAllocationHandle h, unsigned long long flags),
         (addr, size, offset, h, flags)) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = CUDA_SUCCESS;
    ke_mu_lock();
    struct ke_phys *p = ke_phys_of_handle(h);
    struct ke_range *r = ke_range_at(addr);
    bool odd = size == 0 || addr % KE_BIG_PAGE || size % KE_BIG_PAGE || offset != 0;
    if (!p || !r || !r->vmm || addr + size > r->addr + r->size) rc = CUDA_ERROR_INVALID_VALUE;
    else if (odd || size > p->size) rc = CUDA_ERROR_NOT_SUPPORTED; /* as driver 580.159.04 answers */
    else if (first_map_in(addr, size))
        rc = CUDA_ERROR_INVALID_VALUE;
    else if (!ke_map_add((struct ke_map){.addr = addr, .size = size, .phys = p, .prot = PROT_NONE}))
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    else
        p->refs++;
    ke_mu_unlock();
    return rc;
}

/* Returns whether whole VMM mappings, without a gap, make up exactly this range. */
static bool whole(CUdeviceptr addr, size_t size) {
    CUdeviceptr at = addr;
    while (at < addr + size) {
        struct ke_map *m = ke_map_at(at);
        if (!m || m->ctx || m->addr != at) return false;
        at += m->size;
    }
    return size != 0 && at == addr + size;
}

KE_ENTRY(cuMemUnmap, (CUdeviceptr addr, size_t size), (addr, size)) {
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    bool waits = !ke_has(KE_UNMAP_DOES_NOT_WAIT);
    if (waits) ke_wait_context(NULL);
    ke_mu_lock();
    if (whole(addr, size)) {
        struct ke_map *m;
        while ((m = first_map_in(addr, size))) (waits ? ke_map_drop : ke_map_leave)(m);
        ke.unmaps += !waits;
        rc = CUDA_SUCCESS;
    }
    ke_mu_unlock();
    return rc;
}

KE_ENTRY(cuMemSetAccess, (CUdeviceptr addr, size_t size, const CUmemAccessDesc *desc, size_t count),
         (addr, size, desc, count)) {
    CUresult rc = CUDA_SUCCESS;
    if (!desc || count == 0) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    if (!whole(addr, size)) rc = CUDA_ERROR_INVALID_VALUE;
    for (CUdeviceptr at = addr; rc == CUDA_SUCCESS && at < addr + size;) {
        struct ke_map *m = ke_map_at(at);
        for (size_t i = 0; i < count; i++) {
            if ((int)desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) continue; /* the CPU's */
            if (!m->phys->host && (unsigned)desc[i].location.id != m->phys->dev) continue; /* a peer's access */
            int f = (int)desc[i].flags;
            m->prot = f == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                      : f == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                              : PROT_NONE;
        }
        rc = ke_map_apply(m, m->prot);
        at = m->addr + m->size;
    }
    ke_mu_unlock();
    return rc;
}

KE_ENTRY(cuMemGetAccess, (unsigned long long *flags, const CUmemLocation *where, CUdeviceptr addr),
         (flags, where, addr)) {
    if (!flags || !where) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    struct ke_map *m = ke_map_at(addr);
    if (m) {
        bool own = (unsigned)where->id == m->phys->dev;
        *flags = !own || m->prot == PROT_NONE ? CU_MEM_ACCESS_FLAGS_PROT_NONE
                 : m->prot & PROT_WRITE       ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                              : CU_MEM_ACCESS_FLAGS_PROT_READ;
    }
    ke_mu_unlock();
    return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

KE_ENTRY(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle *out, void *addr), (out, addr)) {
    ke_mu_lock();
    struct ke_map *m = ke_map_at((CUdeviceptr)(uintptr_t)addr);
    bool ok = m && !m->ctx && out;
    if (ok) {
        m->phys->refs++;
        m->phys->handles++;
        *out = (CUmemGenericAllocationHandle)(uintptr_t)m->phys;
    }
    ke_mu_unlock();
    return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

KE_ENTRY(cuMemGetAllocationPropertiesFromHandle, (CUmemAllocationProp *prop, CUmemGenericAllocationHandle h),
         (prop, h)) {
    ke_mu_lock();
    struct ke_phys *p = ke_phys_of_handle(h);
    if (p && prop) *prop = p->prop;
    ke_mu_unlock();
    return p && prop ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
