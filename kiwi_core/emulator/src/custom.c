/* Custom storage, the caller's side: another process's device memory mapped here, on one stream per
 * GPU, from the begin of a checkpoint or restore until the caller says that it has copied. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emu.h"

struct CUIcheckpointOperation_st {
    struct CUIcheckpointOperation_st *next;
    int connection; /* to the target; open means under way */
    CUcheckpointCustomStorageInfo info;
    CUcheckpointCustomStoragePerDeviceData gpus[KE_GPUS_MAX];
};
typedef struct CUIcheckpointOperation_st operation;

static operation *under_way; /* ke.mu guards it */

static struct ke_device *device_of(unsigned gpu) {
    for (unsigned i = 0; i < ke.device_count; i++) {
        if (ke.devices[i].gpu == gpu) return &ke.devices[i];
    }
    return NULL;
}

static uint64_t own_contexts(void) { /* ke.mu held */
    uint64_t found = 0;
    for (unsigned i = 0; i < ke.device_count; i++) {
        struct ke_device *d = &ke.devices[i];
        if (d->primary && d->primary->alive) found |= 1ull << d->gpu;
    }
    return found;
}

/* ---- mapping (ke.mu held) ----------------------------------------------------------------------- */

static void unmap(operation *o) {
    for (unsigned i = 0; i < o->info.deviceCount; i++) {
        CUcheckpointCustomStoragePerDeviceData *g = &o->gpus[i];
        for (CUdeviceptr at = g->devPtr; at < g->devPtr + g->size;) {
            struct ke_map *m = ke_map_at(at);
            if (!m) break; /* mapping stopped here */
            at += m->size;
            ke_map_drop(m);
        }
        ke_range_drop(ke_range_at(g->devPtr));
        g->stream->alive = false;
    }
    o->info.deviceCount = 0;
}

static bool map_pieces(const struct ke_piece *pieces, int count, CUdeviceptr at, struct ke_phys *memory) {
    for (int i = 0; i < count; i++) {
        if (pieces[i].device != memory->dev) continue;
        struct ke_map m = {.addr = at, .size = pieces[i].size, .phys_offset = pieces[i].offset,
                           .phys = memory, .prot = PROT_READ | PROT_WRITE};
        if (!ke_map_add(m)) return false;
        memory->refs++;
        at += m.size;
    }
    return true;
}

static uint64_t bytes_of(const struct ke_piece *pieces, int count, unsigned device) {
    uint64_t size = 0;
    for (int i = 0; i < count; i++) size += pieces[i].device == device ? pieces[i].size : 0;
    return size;
}

/* All that the target has on its device number \p device, of which \p *memfd is the memory. */
static CUresult map_device(operation *o, const struct ke_piece *pieces, int count, unsigned device,
                           int *memfd) {
    unsigned gpu = 0;
    for (int i = 0; i < count; i++) gpu = pieces[i].device == device ? pieces[i].gpu : gpu;
    struct ke_device *own = device_of(gpu);
    CUcheckpointCustomStoragePerDeviceData *g = &o->gpus[o->info.deviceCount];
    struct ke_phys *memory = calloc(1, sizeof *memory);
    if (!own || !own->primary || !memory) {
        free(memory);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *memory = (struct ke_phys){.dev = device, .refs = 1, .foreign = true, .foreign_memfd = *memfd};
    *memfd = -1;
    g->size = bytes_of(pieces, count, device);
    g->devPtr = ke_range_reserve(g->size, KE_BIG_PAGE, 0, false);
    CUresult rc = g->devPtr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    if (rc == CUDA_SUCCESS) rc = ke_stream_new(own->primary, CU_STREAM_NON_BLOCKING, 0, &g->stream);
    if (rc != CUDA_SUCCESS && g->devPtr) ke_range_drop(ke_range_at(g->devPtr));
    if (rc == CUDA_SUCCESS) {
        o->info.deviceCount++; /* from here on unmap() knows of it */
        if (!map_pieces(pieces, count, g->devPtr, memory)) rc = CUDA_ERROR_OUT_OF_MEMORY;
    }
    memory->dev = (unsigned)(own - ke.devices); /* what questions about the address answer */
    ke_phys_unref(memory);                      /* each mapping has its own hold */
    return rc;
}

static CUresult map_all(operation *o, int count, int *fds) {
    size_t size = (size_t)count * sizeof(struct ke_piece);
    if (count == 0) return CUDA_SUCCESS;
    struct ke_piece *pieces = mmap(NULL, size, PROT_READ, MAP_SHARED, fds[0], 0);
    if (pieces == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = CUDA_SUCCESS;
    ke_mu_lock();
    for (unsigned i = 0; i < KE_GPUS_MAX && rc == CUDA_SUCCESS; i++) {
        if (fds[1 + i] >= 0 && bytes_of(pieces, count, i)) rc = map_device(o, pieces, count, i, &fds[1 + i]);
    }
    if (rc != CUDA_SUCCESS) unmap(o);
    ke_mu_unlock();
    munmap(pieces, size);
    return rc;
}

/* ---- begin and end ------------------------------------------------------------------------------- */

static CUresult open_operation(operation *o, struct ke_request *r) {
    struct ke_answer a = {0};
    int fds[KE_ANSWER_FDS_MAX];
    CUresult rc = ke_ask(o->connection, r, &a, fds);
    if (rc == CUDA_SUCCESS && (rc = map_all(o, a.value, fds)) != CUDA_SUCCESS) {
        struct ke_request back = {.op = KE_OP_ABANDON};
        ke_ask(o->connection, &back, &a, NULL);
    }
    for (int i = 0; i < KE_ANSWER_FDS_MAX; i++) {
        if (fds[i] >= 0) close(fds[i]);
    }
    return rc;
}

CUresult ke_custom_begin(int pid, struct ke_request *r, CUcheckpointCustomStorageInfo **out) {
    int leader, fd;
    CUresult rc = ke_connect(pid, &leader, &fd);
    if (rc != CUDA_SUCCESS) return rc;
    operation *o = leader == getpid() ? NULL : calloc(1, sizeof *o);
    if (!o) {
        close(fd);
        return leader == getpid() ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_OUT_OF_MEMORY;
    }
    o->connection = fd;
    r->custom = 1;
    ke_mu_lock();
    r->contexts = own_contexts();
    ke_mu_unlock();
    rc = open_operation(o, r);
    if (rc != CUDA_SUCCESS) {
        close(fd);
        free(o);
        return rc;
    }
    o->info.handle = o;
    o->info.perDeviceData = o->info.deviceCount ? o->gpus : NULL;
    ke_mu_lock();
    o->next = under_way;
    under_way = o;
    ke_mu_unlock();
    *out = &o->info;
    return CUDA_SUCCESS;
}

/* Takes it off the list, so that no other thread completes it too. */
static bool claim(operation *o) {
    ke_mu_lock();
    operation **at = &under_way;
    while (*at && *at != o) at = &(*at)->next;
    bool found = *at != NULL;
    if (found) *at = o->next;
    ke_mu_unlock();
    return found;
}

static CUresult complete(operation *o) {
    if (ke.state->driver_version < KE_DRIVER_WITH_CUSTOM_STORAGE) return CUDA_ERROR_NOT_SUPPORTED;
    if (!o || !claim(o)) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = CUDA_SUCCESS;
    for (unsigned i = 0; i < o->info.deviceCount && rc == CUDA_SUCCESS; i++) rc = ke_wait_stream(o->gpus[i].stream);
    ke_mu_lock();
    if (rc != CUDA_SUCCESS) { /* a copy failed: the target still waits, and so does its memory */
        o->next = under_way;
        under_way = o;
        ke_mu_unlock();
        return rc;
    }
    unmap(o);
    ke_mu_unlock();
    struct ke_request r = {.op = KE_OP_COMPLETE};
    struct ke_answer a;
    rc = ke_ask(o->connection, &r, &a, NULL);
    close(o->connection);
    free(o);
    return rc;
}
KE_API CUresult cuCheckpointOperationComplete(CUcheckpointOperationHandle handle) { KE_CALL(complete(handle)); }

void ke_custom_forget(void) { /* the parent's operations must look ended when the parent has */
    for (operation *o = under_way; o; o = o->next) close(o->connection);
    under_way = NULL;
}
