/* Device memory at addresses that we choose. Memory of the VMM calls may have several addresses: it is a piece of a memfd
 * per GPU. An allocation has one address: it is anonymous memory, in huge pages. A memfd has small ones, and to make and
 * free those takes five times as long as to copy them. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emu.h"

/* Both tables are sorted by address and hold no overlaps. */
static struct ke_range *ranges;
static size_t range_count, range_room;
static struct ke_map *maps;
static size_t map_count, map_room;

static bool make_room(void **table, size_t count, size_t *room, size_t each) {
    if (count < *room) return true;
    size_t want = *room ? *room * 2 : 64;
    void *bigger = realloc(*table, want * each);
    if (!bigger) return false;
    *table = bigger;
    *room = want;
    return true;
}

/* ---- physical memory -------------------------------------------------------------------------- */

static void list(struct ke_phys *p) {
    p->refs = 1;
    p->next = ke.phys;
    if (ke.phys) ke.phys->prev = p;
    ke.phys = p;
}

CUresult ke_phys_new(unsigned dev, uint64_t size, struct ke_phys **out) {
    struct ke_device *d = &ke.devices[dev];
    struct ke_phys *p = calloc(1, sizeof *p);
    if (!p) return CUDA_ERROR_OUT_OF_MEMORY;
    if (ke_charge(ke.state, ke.slot, d->gpu, (int64_t)size, 0) != 0) {
        free(p);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    p->dev = dev;
    p->size = size;
    p->offset = d->phys_end;
    if (ftruncate(d->memfd, (off_t)(d->phys_end + size)) != 0) {
        ke_charge(ke.state, ke.slot, d->gpu, -(int64_t)size, 0);
        free(p);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    d->phys_end += size;
    p->file = -1;
    list(p);
    *out = p;
    return CUDA_SUCCESS;
}

struct ke_phys *ke_phys_of_file(unsigned dev, uint64_t size, int file) {
    struct ke_phys *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    *p = (struct ke_phys){.dev = dev, .size = size, .offset = ke.devices[dev].phys_end, .file = file};
    ke.devices[dev].phys_end += size;
    list(p);
    return p;
}

int ke_phys_fd(const struct ke_phys *p) { return p->file >= 0 ? p->file : ke.devices[p->dev].memfd; }
uint64_t ke_phys_at(const struct ke_phys *p) { return p->file >= 0 ? 0 : p->offset; }

void ke_phys_unref(struct ke_phys *p) {
    if (--p->refs) return;
    struct ke_device *d = &ke.devices[p->dev];
    if (p->file >= 0) close(p->file);
    else if (!p->at) fallocate(d->memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)p->offset, (off_t)p->size);
    if (!p->imported && !p->host) ke_charge(ke.state, ke.slot, d->gpu, -(int64_t)p->size, 0);
    if (p->prev) p->prev->next = p->next;
    else ke.phys = p->next;
    if (p->next) p->next->prev = p->prev;
    free(p);
}

/* ---- addresses --------------------------------------------------------------------------------- */

/* Returns the index of the first item that starts after addr. Items begin with their address, and are in order. */
static size_t after(CUdeviceptr addr, const void *items, size_t count, size_t size) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (*(const CUdeviceptr *)((const char *)items + mid * size) <= addr) low = mid + 1;
        else high = mid;
    }
    return low;
}

static size_t range_after(CUdeviceptr addr) { return after(addr, ranges, range_count, sizeof *ranges); }

struct ke_range *ke_range_at(CUdeviceptr addr) {
    size_t i = range_after(addr);
    if (i == 0) return NULL;
    struct ke_range *r = &ranges[i - 1];
    return addr - r->addr < r->size ? r : NULL;
}

static CUdeviceptr gap(uint64_t size, uint64_t align) { /* returns the first gap that fits */
    CUdeviceptr at = KE_DEVICE_BASE;
    for (size_t i = 0; i <= range_count; i++) {
        at = (at + align - 1) / align * align;
        CUdeviceptr end = i < range_count ? ranges[i].addr : KE_DEVICE_BASE + KE_DEVICE_SPAN;
        if (at <= end && end - at >= size) return at;
        if (i < range_count) at = ranges[i].addr + ranges[i].size;
    }
    return 0;
}

CUdeviceptr ke_range_reserve(uint64_t size, uint64_t align, CUdeviceptr hint, bool vmm) {
    if (!make_room((void **)&ranges, range_count, &range_room, sizeof *ranges)) return 0;
    CUdeviceptr at = 0;
    if (hint >= KE_DEVICE_BASE && hint < KE_DEVICE_BASE + KE_DEVICE_SPAN && hint % align == 0) {
        size_t i = range_after(hint);
        bool low = i == 0 || ranges[i - 1].addr + ranges[i - 1].size <= hint;
        bool high = i == range_count || hint + size <= ranges[i].addr;
        if (low && high) at = hint;
    }
    if (!at) at = gap(size, align);
    if (!at) return 0;
    size_t i = range_after(at);
    memmove(&ranges[i + 1], &ranges[i], (range_count - i) * sizeof *ranges);
    ranges[i] = (struct ke_range){at, size, vmm};
    range_count++;
    return at;
}

void ke_range_drop(struct ke_range *r) {
    size_t i = (size_t)(r - ranges);
    memmove(&ranges[i], &ranges[i + 1], (range_count - i - 1) * sizeof *ranges);
    range_count--;
}

/* ---- mappings ---------------------------------------------------------------------------------- */

static size_t map_after(CUdeviceptr addr) { return after(addr, maps, map_count, sizeof *maps); }

struct ke_map *ke_map_at(CUdeviceptr addr) {
    size_t i = map_after(addr);
    if (i == 0) return NULL;
    struct ke_map *m = &maps[i - 1];
    return addr - m->addr < m->size ? m : NULL;
}

size_t ke_map_count(void) { return map_count; }
struct ke_map *ke_map_index(size_t i) { return &maps[i]; }

/* Maps the memory at its addresses, or with PROT_NONE only reserves the addresses. */
CUresult ke_map_apply(const struct ke_map *m, int prot) {
    void *at = (void *)(uintptr_t)m->addr, *got;
    if (prot == PROT_NONE || m->phys->at) {
        got = mmap(at, m->size, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    } else {
        off_t offset = (off_t)(ke_phys_at(m->phys) + m->phys_offset);
        got = mmap(at, m->size, prot, MAP_SHARED | MAP_FIXED, ke_phys_fd(m->phys), offset);
    }
    if (got != at) return CUDA_ERROR_OUT_OF_MEMORY;
    madvise(at, m->size, MADV_DONTFORK);
    if (m->phys->at) madvise(at, m->size, MADV_HUGEPAGE);
    return CUDA_SUCCESS;
}

struct ke_map *ke_map_add(struct ke_map m) {
    if (!make_room((void **)&maps, map_count, &map_room, sizeof *maps)) return NULL;
    if (ke_map_apply(&m, m.prot) != CUDA_SUCCESS) return NULL;
    size_t i = map_after(m.addr);
    memmove(&maps[i + 1], &maps[i], (map_count - i) * sizeof *maps);
    m.id = ++ke.next_id;
    maps[i] = m;
    map_count++;
    return &maps[i];
}

/* Addresses that were unmapped while work was under way. The work must not crash this process: at its end the job
 * finds out that its memory is gone. */
static struct left {
    struct left *next;
    CUdeviceptr addr;
    uint64_t size;
} *left_behind;

static void forget(struct ke_map *m) {
    ke_phys_unref(m->phys);
    size_t i = (size_t)(m - maps);
    memmove(&maps[i], &maps[i + 1], (map_count - i - 1) * sizeof *maps);
    map_count--;
}

void ke_map_drop(struct ke_map *m) {
    munmap((void *)(uintptr_t)m->addr, m->size);
    forget(m);
}

void ke_map_leave(struct ke_map *m) {
    struct left *l = malloc(sizeof *l);
    if (l) {
        *l = (struct left){left_behind, m->addr, m->size};
        left_behind = l;
    }
    forget(m);
}

void ke_maps_bury(void) {
    for (struct left *l; (l = left_behind); free(l)) {
        left_behind = l->next;
        CUdeviceptr at = l->addr, end = l->addr + l->size;
        while (at < end) { /* addresses that have a mapping belong to a newer one by now */
            struct ke_map *m = ke_map_at(at);
            size_t next = map_after(at);
            CUdeviceptr until = next < map_count && maps[next].addr < end ? maps[next].addr : end;
            if (m) until = m->addr + m->size;
            else munmap((void *)(uintptr_t)at, until - at);
            at = until;
        }
    }
}

/* ---- allocations ------------------------------------------------------------------------------- */

CUresult ke_alloc(CUcontext ctx, CUmemoryPool pool, uint64_t asked, CUdeviceptr *out) {
    if (asked == 0 || !out) return CUDA_ERROR_INVALID_VALUE;
    if (asked > KE_DEVICE_SPAN) return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t size = (asked + KE_PAGE - 1) / KE_PAGE * KE_PAGE;
    struct ke_phys *phys;
    unsigned dev = pool ? pool->dev : ctx->dev;
    CUresult rc = ke_phys_new(dev, size, &phys);
    if (rc != CUDA_SUCCESS) return rc;
    CUdeviceptr at = ke_range_reserve(size, size >= KE_BIG_PAGE ? KE_BIG_PAGE : KE_PAGE, 0, false);
    phys->at = (void *)(uintptr_t)at;
    struct ke_map m = {.addr = at, .size = size, .phys = phys, .ctx = ctx->green_of ? ctx->green_of : ctx, .pool = pool,
                       .prot = PROT_READ | PROT_WRITE, .asked = asked};
    if (!at || !ke_map_add(m)) {
        if (at) ke_range_drop(ke_range_at(at));
        ke_phys_unref(phys);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (pool) {
        pool->used += size;
        if (pool->used > pool->used_high) pool->used_high = pool->used;
    }
    *out = at;
    return CUDA_SUCCESS;
}

static void drop_allocation(struct ke_map *m) {
    CUdeviceptr at = m->addr;
    if (m->pool) m->pool->used -= m->size;
    ke_map_drop(m);
    ke_range_drop(ke_range_at(at));
}

CUresult ke_free(CUdeviceptr addr) {
    struct ke_map *m = ke_map_at(addr);
    if (!m || m->addr != addr || !m->ctx) return CUDA_ERROR_INVALID_VALUE;
    drop_allocation(m);
    return CUDA_SUCCESS;
}

void ke_free_context(CUcontext ctx) {
    for (size_t i = map_count; i-- > 0;) {
        if (maps[i].ctx == ctx) drop_allocation(&maps[i]);
    }
}

static CUresult alloc(CUdeviceptr *out, size_t size) {
    CUcontext ctx;
    CUresult rc = ke_current(&ctx);
    if (rc != CUDA_SUCCESS) return rc;
    ke_mu_lock();
    rc = ke_alloc(ctx, NULL, size, out);
    ke_mu_unlock();
    return rc;
}
KE_API CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize) { KE_CALL_UNSAFE(alloc(dptr, bytesize)); }

KE_ENTRY_UNSAFE(cuMemAllocPitch_v2, (CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned each),
                (out, pitch, width, height, each)) {
    (void)each;
    if (!pitch || width == 0 || height == 0) return CUDA_ERROR_INVALID_VALUE;
    *pitch = (width + 511) / 512 * 512;
    return alloc(out, *pitch * height);
}

/* Frees memory after waiting for the context's work, as the real driver does. */
KE_ENTRY_UNSAFE(cuMemFree_v2, (CUdeviceptr addr), (addr)) {
    CUcontext ctx;
    if (addr == 0) return CUDA_SUCCESS;
    CUresult rc = ke_current(&ctx);
    if (rc == CUDA_ERROR_INVALID_CONTEXT || rc == CUDA_ERROR_CONTEXT_IS_DESTROYED) return rc;
    ke_mu_lock();
    struct ke_map *m = ke_map_at(addr);
    ctx = m && m->addr == addr ? m->ctx : NULL;
    ke_mu_unlock();
    if (!ctx) return CUDA_ERROR_INVALID_VALUE;
    ke_wait_context(ctx);
    ke_mu_lock();
    rc = ke_free(addr);
    ke_mu_unlock();
    return rc;
}

static CUresult info(size_t *free_bytes, size_t *total_bytes) {
    CUcontext ctx;
    if (!free_bytes || !total_bytes) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = ke_current(&ctx);
    if (rc != CUDA_SUCCESS) return rc;
    unsigned gpu = ke.devices[ctx->dev].gpu;
    ke_state_lock(ke.state);
    ke_reap(ke.state);
    uint64_t used = ke_gpu_used(ke.state, gpu), total = ke.state->gpus[gpu].total_bytes;
    ke_state_unlock(ke.state);
    *total_bytes = total;
    *free_bytes = used < total ? total - used : 0;
    return CUDA_SUCCESS;
}
KE_API CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    if (ke_held(KE_MEMORY_INFO_FAILS) == KE_OUT) return CUDA_ERROR_OPERATING_SYSTEM;
    KE_CALL_ANSWERED(KE_MEMORY_INFO_FAILS, info(free, total));
}

/* Gets the range of an address, also in pinned host memory: a device sees that at the same address. */
KE_ENTRY(cuMemGetAddressRange_v2, (CUdeviceptr *base, size_t *size, CUdeviceptr addr), (base, size, addr)) {
    void *start = NULL;
    size_t bytes = 0;
    ke_mu_lock();
    struct ke_map *m = ke_map_at(addr);
    bool found = m || ke_host_range((void *)(uintptr_t)addr, &start, &bytes);
    if (m) start = (void *)(uintptr_t)m->addr, bytes = m->asked ? m->asked : m->size;
    ke_mu_unlock();
    if (!found) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = (CUdeviceptr)(uintptr_t)start;
    if (size) *size = bytes;
    return CUDA_SUCCESS;
}
