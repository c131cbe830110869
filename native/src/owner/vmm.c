/* The program's own virtual memory management. */
#include "owner/vmm.h"

#include <stdlib.h>
#include <string.h>

#include "base/daemon.h"
#include "base/kiwi_preload.h"
#include "base/real.h"
#include "base/tested.h"
#include "owner/handles.h"

bool kp_vmm_owns(const CUmemAllocationProp *prop) {
    if (kp_forked || !prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return false;
    if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return false;
    if (prop->allocFlags.usage) return false; /* it is for sparse arrays, whose mappings nobody could tell us */
    return __atomic_load_n(&kp_gpu.known, __ATOMIC_ACQUIRE) && kp_gpu.usable && prop->location.id == kp_gpu.device;
}

/* ---- changes, and passes ---- */

/* Frees pass a closed gate, and must not change what a pass works on: they and passes wait for each other. */
static pthread_cond_t over = PTHREAD_COND_INITIALIZER;
static unsigned changes; /* under way; kp_table_mu */

static void begin_change(void) {
    pthread_mutex_lock(&kp_table_mu);
    while (kp_moving) pthread_cond_wait(&over, &kp_table_mu);
    changes++;
}

static void end_change(void) { /* kp_table_mu held, released here */
    if (--changes == 0) pthread_cond_broadcast(&over);
    pthread_mutex_unlock(&kp_table_mu);
}

void kp_vmm_await_changes(void) {
    while (changes) pthread_cond_wait(&over, &kp_table_mu);
}

void kp_vmm_pass_over(void) { pthread_cond_broadcast(&over); }

/* ---- objects ---- */

static void changed(void) {
    kp_arena_aim(__atomic_load_n(&kp_totals.owned, __ATOMIC_RELAXED));
    kp_daemon_books_changed();
}

static struct kp_object *make(size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags) {
    struct kp_object *o = calloc(1, sizeof *o);
    struct kp_block *b = calloc(1, sizeof *b + sizeof b->chunks[0]);
    if (!o || !b) {
        free(o);
        free(b);
        return NULL;
    }
    *b = (struct kp_block){.bytes = bytes, .asked = bytes, .object = o, .chunk_count = 1};
    b->chunks[0] = (struct kp_chunk){.bytes = bytes, .where = KP_IN};
    *o = (struct kp_object){.prop = *prop, .flags = flags, .references = 1, .block = b};
    return o;
}

static void end(struct kp_object *o) { /* it is in no table any more */
    kp_object_close(o);
    if (o->handle) kp_real.cuMemRelease(o->handle);
    kp_arena_give(&o->block->chunks[0].copy);
    free(o->block);
    free(o);
}

/* Objects belong to no context. The one in which the program makes them is the best to copy them with. */
static void note_context(void) {
    CUdevice device;
    struct kp_ctx *c = kp_own_current(&device);
    if (c) kp_ctx_let_go(c);
}

CUresult kp_vmm_create(CUmemGenericAllocationHandle *name, size_t bytes, const CUmemAllocationProp *prop,
                       unsigned long long flags) {
    CUmemGenericAllocationHandle handle;
    CUresult rc = kp_fault(KP_FAULT_CREATE) ? CUDA_ERROR_OUT_OF_MEMORY
                                            : kp_real.cuMemCreate(&handle, bytes, prop, flags);
    if (rc != CUDA_SUCCESS) return rc;
    struct kp_object *o = make(bytes, prop, flags);
    pthread_mutex_lock(&kp_table_mu);
    bool added = o && kp_object_add(o);
    if (added) {
        o->handle = handle;
        kp_block_count(o->block, 1);
        *name = o->name;
    }
    pthread_mutex_unlock(&kp_table_mu);
    if (added) {
        note_context();
        kp_need_grew(bytes);
        changed();
        return rc;
    }
    kp_real.cuMemRelease(handle);
    if (o) end(o);
    return CUDA_ERROR_MAP_FAILED; /* the process has no memory left: room in the GPU would not help */
}

CUresult kp_vmm_release(CUmemGenericAllocationHandle name) {
    begin_change();
    struct kp_object *o = kp_object_named(name);
    bool held = o && o->references, last = false;
    if (held) {
        o->references--;
        last = kp_object_over(o);
    }
    if (last) kp_block_count(o->block, -1);
    end_change();
    if (last) end(o);
    if (last) changed();
    return held ? CUDA_SUCCESS : kp_is_name(name) ? CUDA_ERROR_INVALID_VALUE : kp_real.cuMemRelease(name);
}

CUresult kp_vmm_retain(CUmemGenericAllocationHandle *name, void *address) {
    pthread_mutex_lock(&kp_table_mu);
    struct kp_mapping *m = name ? kp_mapping_at((CUdeviceptr)(uintptr_t)address) : NULL;
    if (m) {
        m->of->references++;
        *name = m->of->name;
    }
    pthread_mutex_unlock(&kp_table_mu);
    if (m) return CUDA_SUCCESS;
    /* Memory of cuMemAlloc has no handle: programs find out in this way whether they may share it by one. */
    if (kp_own_has((CUdeviceptr)(uintptr_t)address)) return CUDA_ERROR_INVALID_VALUE;
    return kp_real.cuMemRetainAllocationHandle(name, address);
}

bool kp_vmm_is_ours(CUmemGenericAllocationHandle handle) { return kp_is_name(handle); }

CUmemGenericAllocationHandle kp_vmm_handle(CUmemGenericAllocationHandle name) {
    if (!kp_is_name(name)) return name;
    pthread_mutex_lock(&kp_table_mu);
    struct kp_object *o = kp_object_named(name);
    CUmemGenericAllocationHandle handle = o ? o->handle : name;
    pthread_mutex_unlock(&kp_table_mu);
    return handle;
}

/* Is not gated: it answers for memory that is out, too. */
CUresult kp_vmm_properties(CUmemAllocationProp *prop, CUmemGenericAllocationHandle name) {
    bool out = false;
    begin_change();
    struct kp_object *o = kp_object_named(name);
    CUmemGenericAllocationHandle handle = o ? o->handle : name;
    if (o && prop && (out = !handle)) *prop = o->prop;
    pthread_mutex_unlock(&kp_table_mu);
    CUresult rc = out ? CUDA_SUCCESS : kp_real.cuMemGetAllocationPropertiesFromHandle(prop, handle);
    pthread_mutex_lock(&kp_table_mu);
    end_change();
    return rc;
}

/* ---- mappings ---- */

CUresult kp_vmm_map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle name,
                    unsigned long long flags) {
    struct kp_mapping *m = kp_is_name(name) ? calloc(1, sizeof *m) : NULL;
    if (kp_is_name(name) && !m) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = kp_real.cuMemMap(at, bytes, offset, kp_vmm_handle(name), flags);
    pthread_mutex_lock(&kp_table_mu);
    struct kp_object *o = rc == CUDA_SUCCESS ? kp_object_named(name) : NULL;
    bool kept = false;
    if (o && m) {
        *m = (struct kp_mapping){.of = o, .at = at, .bytes = bytes, .offset = offset, .flags = flags,
                                 .there = true, .reachable = true};
        kept = kp_mapping_add(m);
        if (!kept) kp_block_stays(o->block, KP_FOREIGN_VMM); /* a mapping that we do not know cannot come back */
    }
    pthread_mutex_unlock(&kp_table_mu);
    if (!kept) free(m);
    return rc;
}

static bool within(const struct kp_mapping *m, CUdeviceptr at, size_t bytes) {
    return m->at >= at && m->at + m->bytes <= at + bytes;
}

/* Returns the mapping number i if any of it is in the range. */
static struct kp_mapping *in_range(size_t i, CUdeviceptr at, size_t bytes) {
    struct kp_mapping *m = kp_mapping_number(i);
    return m && m->at < at + bytes ? m : NULL;
}

static bool any_out(CUdeviceptr at, size_t bytes) {
    bool out = false;
    struct kp_mapping *m;
    for (size_t i = kp_mapping_from(at); (m = in_range(i, at, bytes)); i++) out = out || !m->there;
    return out;
}

/* Unmaps a range in which the driver lacks something, because the memory is out: what is there, one by one. */
static CUresult unmap_some(CUdeviceptr at, size_t bytes) { /* kp_table_mu held, released meanwhile */
    CUdeviceptr next = at;
    CUresult rc = CUDA_SUCCESS;
    struct kp_mapping *m;
    for (size_t i = kp_mapping_from(at); (m = in_range(i, at, bytes)); i++) {
        if (m->at != next) return CUDA_ERROR_INVALID_VALUE; /* not whole mappings, as the driver demands */
        next += m->bytes;
    }
    if (next != at + bytes) return CUDA_ERROR_INVALID_VALUE;
    for (next = at; rc == CUDA_SUCCESS && next < at + bytes; next += m->bytes) {
        m = kp_mapping_at(next);
        if (!m->there) continue;
        pthread_mutex_unlock(&kp_table_mu);
        rc = kp_real.cuMemUnmap(m->at, m->bytes);
        pthread_mutex_lock(&kp_table_mu);
        if (rc == CUDA_SUCCESS) m->there = m->reachable = false;
    }
    return rc;
}

/* Takes the mappings out of the tables; returns objects that end with them, as a list by `next`. */
static struct kp_object *forget(CUdeviceptr at, size_t bytes) {
    struct kp_object *ended = NULL;
    struct kp_mapping *m;
    for (size_t i = kp_mapping_from(at); (m = in_range(i, at, bytes));) {
        struct kp_object *o = m->of;
        if (!within(m, at, bytes)) { /* no driver so far has done that to a part of a mapping */
            kp_block_stays(o->block, KP_FOREIGN_VMM);
            i++;
            continue;
        }
        kp_mapping_remove(m);
        if (!kp_object_over(o)) continue;
        kp_block_count(o->block, -1);
        o->next = ended;
        ended = o;
    }
    return ended;
}

CUresult kp_vmm_unmap(CUdeviceptr at, size_t bytes) {
    struct kp_object *ended = NULL, *o;
    CUresult rc;
    begin_change();
    if (any_out(at, bytes)) {
        rc = unmap_some(at, bytes);
    } else {
        pthread_mutex_unlock(&kp_table_mu);
        rc = kp_real.cuMemUnmap(at, bytes);
        pthread_mutex_lock(&kp_table_mu);
    }
    if (rc == CUDA_SUCCESS) ended = forget(at, bytes);
    bool some = ended;
    end_change();
    while ((o = ended)) {
        ended = o->next;
        end(o);
    }
    if (some) changed();
    return rc;
}

static bool same_place(const CUmemAccessDesc *a, const CUmemAccessDesc *b) {
    return a->location.type == b->location.type && a->location.id == b->location.id;
}

static bool let(struct kp_mapping *m, const CUmemAccessDesc *desc) { /* false: no memory */
    unsigned i = 0;
    while (i < m->access_count && !same_place(&m->access[i], desc)) i++;
    if (i == m->access_count) {
        CUmemAccessDesc *more = realloc(m->access, (i + 1) * sizeof *more);
        if (!more) return false;
        m->access = more;
        m->access_count++;
    }
    m->access[i] = *desc;
    if (desc->flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) m->access[i] = m->access[--m->access_count]; /* as at first */
    return true;
}

CUresult kp_vmm_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    CUresult rc = kp_real.cuMemSetAccess(at, bytes, access, count);
    struct kp_mapping *m;
    if (rc != CUDA_SUCCESS) return rc;
    pthread_mutex_lock(&kp_table_mu);
    for (size_t i = kp_mapping_from(at); (m = in_range(i, at, bytes)); i++) {
        bool known = within(m, at, bytes); /* no driver so far has changed a part of a mapping */
        for (size_t d = 0; d < count; d++) known = known && let(m, &access[d]);
        if (!known) kp_block_stays(m->of->block, KP_FOREIGN_VMM);
    }
    pthread_mutex_unlock(&kp_table_mu);
    return rc;
}

/* The driver sees no mapping where the memory is out, and would give the addresses to somebody else. */
CUresult kp_vmm_address_free(CUdeviceptr at, size_t bytes) {
    begin_change();
    bool out = any_out(at, bytes);
    pthread_mutex_unlock(&kp_table_mu);
    CUresult rc = out ? CUDA_ERROR_INVALID_VALUE : kp_real.cuMemAddressFree(at, bytes);
    pthread_mutex_lock(&kp_table_mu);
    end_change();
    return rc;
}
