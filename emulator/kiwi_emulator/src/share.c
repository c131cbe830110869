/* Memory that leaves the process: exported and imported handles, ranges that a device may read by itself. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "emu.h"

#define FILE_NAME "kiwi-emulated-gpu-" /* with the index of the GPU: how an importer knows the file */
#define STEP (1u << 20)

static bool copy_to(int file, const struct ke_phys *p) {
    char *buffer = malloc(STEP);
    bool ok = buffer != NULL;
    for (uint64_t done = 0; ok && done < p->size;) {
        size_t n = p->size - done < STEP ? (size_t)(p->size - done) : STEP;
        ok = pread(ke_phys_fd(p), buffer, n, (off_t)(ke_phys_at(p) + done)) == (ssize_t)n &&
             pwrite(file, buffer, n, (off_t)done) == (ssize_t)n;
        done += n;
    }
    free(buffer);
    return ok;
}

/* Moves memory into a file of its own, which other processes can map, at all its addresses. No work is under way. */
static CUresult give_file(struct ke_phys *p) {
    char name[sizeof FILE_NAME + 12];
    snprintf(name, sizeof name, FILE_NAME "%u", ke.devices[p->dev].gpu);
    int file = memfd_create(name, MFD_CLOEXEC);
    if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    if (ftruncate(file, (off_t)p->size) != 0 || !copy_to(file, p)) {
        close(file);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    fallocate(ke_phys_fd(p), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)p->offset, (off_t)p->size);
    p->file = file;
    p->shared = true;
    CUresult rc = CUDA_SUCCESS;
    for (size_t i = 0; i < ke_map_count() && rc == CUDA_SUCCESS; i++) {
        struct ke_map *m = ke_map_index(i);
        if (m->phys == p) rc = ke_map_apply(m, m->prot);
    }
    return rc;
}

KE_ENTRY(cuMemExportToShareableHandle,
         (void *shareable, CUmemGenericAllocationHandle h, CUmemAllocationHandleType type, unsigned long long flags),
         (shareable, h, type, flags)) {
    int *out = shareable;
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    ke_wait_context(NULL);
    ke_mu_lock();
    struct ke_phys *p = ke_phys_of_handle(h);
    CUresult rc = out && p && (p->prop.requestedHandleTypes & type) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (rc == CUDA_SUCCESS && p->file < 0) rc = give_file(p);
    if (rc == CUDA_SUCCESS) *out = fcntl(p->file, F_DUPFD_CLOEXEC, 0);
    ke_mu_unlock();
    return rc == CUDA_SUCCESS && *out < 0 ? CUDA_ERROR_OPERATING_SYSTEM : rc;
}

/* Returns the device whose memory the descriptor stands for; -1: it stands for no memory that this process sees. */
static int device_of(int fd) {
    char path[64], name[96];
    unsigned gpu;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(path, name, sizeof name - 1);
    if (n < 0) return -1;
    name[n] = 0;
    if (sscanf(name, "/memfd:" FILE_NAME "%u", &gpu) != 1) return -1;
    for (unsigned i = 0; i < ke.device_count; i++)
        if (ke.devices[i].gpu == gpu) return (int)i;
    return -1;
}

static CUresult import(CUmemGenericAllocationHandle *out, int fd) {
    struct stat file;
    int dev = device_of(fd);
    if (dev < 0 || fstat(fd, &file) != 0) return CUDA_ERROR_INVALID_VALUE;
    int mine = fcntl(fd, F_DUPFD_CLOEXEC, 0); /* the caller closes its own */
    struct ke_phys *p = mine < 0 ? NULL : ke_phys_of_file((unsigned)dev, (uint64_t)file.st_size, mine);
    if (!p) {
        if (mine >= 0) close(mine);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    p->imported = true;
    p->handles = 1;
    p->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p->prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    p->prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p->prop.location.id = dev;
    *out = (CUmemGenericAllocationHandle)(uintptr_t)p;
    return CUDA_SUCCESS;
}

/* The exporter's memory: its bytes are on that process's books. */
KE_ENTRY(cuMemImportFromShareableHandle,
         (CUmemGenericAllocationHandle *out, void *shareable, CUmemAllocationHandleType type), (out, shareable, type)) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    ke_mu_lock();
    CUresult rc = import(out, (int)(intptr_t)shareable);
    ke_mu_unlock();
    return rc;
}

/* Answers a descriptor that stands for the range. Nobody can read by it: there is no other device here. */
KE_ENTRY(cuMemGetHandleForAddressRange,
         (void *out, CUdeviceptr addr, size_t size, CUmemRangeHandleType type, unsigned long long flags),
         (out, addr, size, type, flags)) {
    if (!out || (int)type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags) return CUDA_ERROR_INVALID_VALUE;
    if (size == 0 || addr % KE_PAGE || size % KE_PAGE) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    struct ke_range *r = ke_range_at(addr);
    bool mapped = r && addr + size <= r->addr + r->size;
    for (CUdeviceptr at = addr; mapped && at < addr + size;) {
        struct ke_map *m = ke_map_at(at);
        mapped = m && !m->phys->host;
        if (mapped) at = m->addr + m->size;
    }
    ke_mu_unlock();
    if (!mapped) return CUDA_ERROR_INVALID_VALUE;
    *(int *)out = memfd_create("kiwi-emulated-dmabuf", MFD_CLOEXEC);
    return *(int *)out < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

/* All copies here are synchronous enough: only the pointer and the attribute are judged. */
KE_ENTRY(cuPointerSetAttribute, (const void *value, CUpointer_attribute what, CUdeviceptr p), (value, what, p)) {
    if (!value || (int)what != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    bool there = ke_map_at(p);
    ke_mu_unlock();
    return there ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
