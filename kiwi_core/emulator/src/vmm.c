/* Virtual memory management, with addresses, memory and access as three separate things. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "emu.h"

/* Returns the memory of a handle. Handles are pointers to ke_phys, checked against the list. */
static struct ke_phys *by_handle(CUmemGenericAllocationHandle h) {
    for (struct ke_phys *p = ke.phys; p; p = p->next) {
        if ((uintptr_t)p == (uintptr_t)h && p->handles) return p;
    }
    return NULL;
}

static CUresult check_prop(const CUmemAllocationProp *prop) {
    if (!prop || (int)prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    if ((int)prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    int id = prop->location.id;
    return id < 0 || (unsigned)id >= ke.device_count ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

static CUresult granularity(size_t *out, const CUmemAllocationProp *prop) {
    CUresult rc = check_prop(prop);
    if (!out) rc = CUDA_ERROR_INVALID_VALUE;
    if (rc == CUDA_SUCCESS) *out = KE_BIG_PAGE;
    return rc;
}
KE_API CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop,
                                              CUmemAllocationGranularity_flags option) {
    (void)option;
    KE_CALL(granularity(out, prop));
}

static CUresult create(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *prop) {
    CUresult rc = check_prop(prop);
    if (rc != CUDA_SUCCESS) return rc;
    if (!out || size == 0 || size % KE_BIG_PAGE) return CUDA_ERROR_INVALID_VALUE;
    struct ke_phys *p;
    ke_mu_lock();
    rc = ke_phys_new((unsigned)prop->location.id, size, &p);
    if (rc == CUDA_SUCCESS) {
        p->handles = 1;
        p->prop = *prop;
        *out = (CUmemGenericAllocationHandle)(uintptr_t)p;
    }
    ke_mu_unlock();
    return rc;
}
KE_API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                            const CUmemAllocationProp *prop, unsigned long long flags) {
    KE_CALL(flags ? CUDA_ERROR_INVALID_VALUE : create(handle, size, prop));
}

static CUresult release(CUmemGenericAllocationHandle h) {
    ke_mu_lock();
    struct ke_phys *p = by_handle(h);
    if (p) {
        p->handles--;
        ke_phys_unref(p);
    }
    ke_mu_unlock();
    return p ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
KE_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { KE_CALL(release(handle)); }

static CUresult reserve(CUdeviceptr *out, size_t size, size_t align, CUdeviceptr hint) {
    if (!out || size == 0 || size % KE_BIG_PAGE) return CUDA_ERROR_INVALID_VALUE;
    if (align == 0) align = KE_BIG_PAGE;
    if (align & (align - 1)) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    *out = ke_range_reserve(size, align < KE_BIG_PAGE ? KE_BIG_PAGE : align, hint, true);
    ke_mu_unlock();
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
KE_API CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                    unsigned long long flags) {
    (void)flags;
    KE_CALL(reserve(ptr, size, alignment, addr));
}

static struct ke_map *first_map_in(CUdeviceptr addr, size_t size) {
    for (size_t i = 0; i < ke_map_count(); i++) {
        struct ke_map *m = ke_map_index(i);
        if (m->addr < addr + size && addr < m->addr + m->size) return m;
    }
    return NULL;
}

static CUresult address_free(CUdeviceptr addr, size_t size) {
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
KE_API CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) { KE_CALL(address_free(ptr, size)); }

static CUresult map(CUdeviceptr addr, size_t size, size_t offset, CUmemGenericAllocationHandle h) {
    CUresult rc = CUDA_SUCCESS;
    ke_mu_lock();
    struct ke_phys *p = by_handle(h);
    struct ke_range *r = ke_range_at(addr);
    if (!p || !r || !r->vmm || size == 0 || addr % KE_BIG_PAGE || size % KE_BIG_PAGE || offset != 0 ||
        size > p->size || addr + size > r->addr + r->size)
        rc = CUDA_ERROR_INVALID_VALUE;
    else if (first_map_in(addr, size))
        rc = CUDA_ERROR_INVALID_VALUE;
    else if (!ke_map_add((struct ke_map){.addr = addr, .size = size, .phys = p, .prot = PROT_NONE}))
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    else
        p->refs++;
    ke_mu_unlock();
    return rc;
}
KE_API CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    KE_CALL(flags ? CUDA_ERROR_INVALID_VALUE : map(ptr, size, offset, handle));
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

static CUresult unmap(CUdeviceptr addr, size_t size) {
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
KE_API CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) { KE_CALL(unmap(ptr, size)); }

static CUresult set_access(CUdeviceptr addr, size_t size, const CUmemAccessDesc *desc, size_t count) {
    CUresult rc = CUDA_SUCCESS;
    if (!desc || count == 0) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    if (!whole(addr, size)) rc = CUDA_ERROR_INVALID_VALUE;
    for (CUdeviceptr at = addr; rc == CUDA_SUCCESS && at < addr + size;) {
        struct ke_map *m = ke_map_at(at);
        for (size_t i = 0; i < count; i++) {
            if ((unsigned)desc[i].location.id != m->phys->dev) continue; /* a peer's access */
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
KE_API CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count) {
    KE_CALL(set_access(ptr, size, desc, count));
}

static CUresult get_access(unsigned long long *flags, const CUmemLocation *where, CUdeviceptr addr) {
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
KE_API CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr) {
    KE_CALL(get_access(flags, location, ptr));
}

static CUresult retain(CUmemGenericAllocationHandle *out, void *addr) {
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
KE_API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr) {
    KE_CALL(retain(handle, addr));
}

/* Exports a handle. The descriptor is a real one; importing it is not emulated. */
static CUresult export(int *out, CUmemGenericAllocationHandle h, CUmemAllocationHandleType type) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    ke_mu_lock();
    struct ke_phys *p = by_handle(h);
    bool ok = out && p && (p->prop.requestedHandleTypes & type);
    if (ok) *out = fcntl(ke.devices[p->dev].memfd, F_DUPFD_CLOEXEC, 0);
    ke_mu_unlock();
    if (!ok) return CUDA_ERROR_INVALID_VALUE;
    return *out < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}
KE_API CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type, unsigned long long flags) {
    KE_CALL(flags ? CUDA_ERROR_INVALID_VALUE : export(shareable, handle, type));
}

static CUresult properties(CUmemAllocationProp *prop, CUmemGenericAllocationHandle h) {
    ke_mu_lock();
    struct ke_phys *p = by_handle(h);
    if (p && prop) *prop = p->prop;
    ke_mu_unlock();
    return p && prop ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
KE_API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop,
                                                       CUmemGenericAllocationHandle handle) {
    KE_CALL(properties(prop, handle));
}
