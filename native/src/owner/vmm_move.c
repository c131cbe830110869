/* Takes the memory of an object away from all its addresses, and puts new memory there. For the pager thread. */
#include <stddef.h>

#include "base/log.h"
#include "base/real.h"
#include "base/tested.h"
#include "owner/handles.h"
#include "owner/pass.h"

#define WINDOW_FAILURES 3 /* after so many page-outs in a row that failed for an object, it is left to the driver */

static bool may_write(const struct kp_mapping *m) { /* from our GPU */
    for (unsigned i = 0; i < m->access_count; i++) {
        const CUmemAccessDesc *a = &m->access[i];
        if (a->location.type == CU_MEM_LOCATION_TYPE_DEVICE && a->location.id == kp_gpu.device)
            return a->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    return false;
}

/* Makes all of the object reachable at an address range of ours. OUT_OF_MEMORY would mean GPU memory, which is not what
 * lacks here. */
static CUresult open_window(struct kp_object *o) {
    size_t bytes = o->block->bytes;
    CUdeviceptr at;
    CUresult rc = kp_fault(KP_FAULT_RESERVE) ? CUDA_ERROR_OUT_OF_MEMORY
                                             : kp_real.cuMemAddressReserve(&at, bytes, 0, 0, 0);
    if (rc != CUDA_SUCCESS) return rc == CUDA_ERROR_OUT_OF_MEMORY ? CUDA_ERROR_MAP_FAILED : rc;
    rc = kp_fault(KP_FAULT_MAP) ? CUDA_ERROR_MAP_FAILED : kp_real.cuMemMap(at, bytes, 0, o->handle, 0);
    bool mapped = rc == CUDA_SUCCESS;
    if (mapped) rc = kp_physical_access(at, bytes);
    if (rc == CUDA_SUCCESS) {
        o->window = at;
        return rc;
    }
    if (mapped) kp_real.cuMemUnmap(at, bytes);
    kp_real.cuMemAddressFree(at, bytes);
    return rc == CUDA_ERROR_OUT_OF_MEMORY ? CUDA_ERROR_MAP_FAILED : rc;
}

/* A mapping of the program serves if it has all of the object, and our GPU may write there. */
CUresult kp_object_open(struct kp_object *o) {
    CUresult rc = CUDA_SUCCESS;
    struct kp_mapping *m = o->mappings;
    while (m && (!m->reachable || m->offset || m->bytes != o->block->bytes || !may_write(m))) m = m->next;
    if (!m && !o->window) rc = open_window(o);
    o->block->addr = m ? m->at : o->window;
    return rc;
}

CUresult kp_object_close(struct kp_object *o) {
    CUresult rc = o->window ? kp_physical_unmap(o->window, o->block->bytes) : CUDA_SUCCESS;
    if (!o->window || rc != CUDA_SUCCESS) return rc; /* it would keep the memory in the GPU */
    kp_real.cuMemAddressFree(o->window, o->block->bytes);
    o->window = 0;
    return rc;
}

CUresult kp_object_open_for_out(struct kp_object *o) {
    CUresult rc = kp_object_open(o);
    if (rc == CUDA_SUCCESS) o->window_failures = 0;
    if (rc == CUDA_SUCCESS || ++o->window_failures < WINDOW_FAILURES) return rc;
    kp_note("an object of %zu bytes has no addresses to be copied from: it is left to the driver", o->block->bytes);
    pthread_mutex_lock(&kp_table_mu);
    kp_block_stays(o->block, KP_FOREIGN_VMM);
    pthread_mutex_unlock(&kp_table_mu);
    return rc;
}

static CUresult map_one(struct kp_object *o, struct kp_mapping *m) {
    CUresult rc = CUDA_SUCCESS;
    if (!m->there)
        rc = kp_fault(KP_FAULT_MAP) ? CUDA_ERROR_MAP_FAILED
                                    : kp_real.cuMemMap(m->at, m->bytes, m->offset, o->handle, m->flags);
    m->there = rc == CUDA_SUCCESS;
    if (m->there && !m->reachable && m->access_count)
        rc = kp_fault(KP_FAULT_ACCESS) ? CUDA_ERROR_UNKNOWN
                                       : kp_real.cuMemSetAccess(m->at, m->bytes, m->access, m->access_count);
    m->reachable = rc == CUDA_SUCCESS;
    return rc;
}

static CUresult map_all(struct kp_object *o) {
    CUresult rc = CUDA_SUCCESS;
    for (struct kp_mapping *m = o->mappings; m && rc == CUDA_SUCCESS; m = m->next) {
        if (!m->reachable) rc = map_one(o, m);
    }
    return rc;
}

static CUresult unmap_all(struct kp_object *o) {
    CUresult rc = CUDA_SUCCESS;
    for (struct kp_mapping *m = o->mappings; m && rc == CUDA_SUCCESS; m = m->next) {
        if (m->there) rc = kp_physical_unmap(m->at, m->bytes);
        if (rc == CUDA_SUCCESS) m->there = m->reachable = false;
    }
    return rc;
}

CUresult kp_object_out(struct kp_object *o) {
    CUresult rc = kp_object_close(o);
    if (rc == CUDA_SUCCESS) rc = unmap_all(o);
    if (rc != CUDA_SUCCESS) {
        /* The memory itself is there still. If it is the one that counts, all its addresses must have it. */
        struct kp_chunk *c = &o->block->chunks[0];
        if (c->where == KP_IN && map_all(o) != CUDA_SUCCESS) kp_bytes_moved(c, KP_ARRIVING);
        return rc;
    }
    if (o->handle) kp_real.cuMemRelease(o->handle);
    o->handle = 0;
    return rc;
}

CUresult kp_object_in(struct kp_object *o) {
    CUresult rc = CUDA_SUCCESS;
    bool made = !o->handle;
    if (made) rc = kp_fault(KP_FAULT_CREATE) ? CUDA_ERROR_OUT_OF_MEMORY
                                             : kp_real.cuMemCreate(&o->handle, o->block->bytes, &o->prop, o->flags);
    if (rc != CUDA_SUCCESS) {
        o->handle = 0;
        return rc;
    }
    rc = map_all(o);
    if (rc == CUDA_SUCCESS) rc = kp_object_open(o);
    if (rc != CUDA_SUCCESS && made && kp_object_out(o) != CUDA_SUCCESS)
        kp_bytes_moved(&o->block->chunks[0], KP_ARRIVING);
    return rc;
}
