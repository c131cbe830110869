/* Memory that Kiwi owns: what the wrappers call instead of the driver.
 *
 * An allocation gets an address range of its own (or a slot of a slab) that stays its address for
 * life; the physical memory behind it comes from the driver's virtual memory management and can be
 * taken away and put back.  What cannot be owned is passed on, named and counted.
 */
#ifndef KP_OWN_H
#define KP_OWN_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- called by the wrappers; each returns what the driver would ------------------------------------ */

CUresult kp_own_alloc(CUdeviceptr *p, size_t bytes); /* cuMemAlloc_v2; inside the gate */
CUresult kp_own_alloc_pitch(CUdeviceptr *p, size_t *pitch, size_t width, size_t height, unsigned elem);
/* cuMemFree_v2.  Does not pass the gate: it must work while memory is out, and while a pager moves
 * it.  A pointer that is not ours goes to the driver. */
CUresult kp_own_free(CUdeviceptr p);
CUresult kp_own_free_async(CUdeviceptr p, CUstream stream); /* owned memory: like kp_own_free */
bool kp_own_has(CUdeviceptr p);                             /* p points into memory that is ours */
CUresult kp_own_range(CUdeviceptr *base, size_t *size, CUdeviceptr p); /* cuMemGetAddressRange_v2 */
CUresult kp_own_pointer_attribute(void *data, CUpointer_attribute what, CUdeviceptr p);
CUresult kp_own_pointer_attributes(unsigned n, CUpointer_attribute *what, void **data, CUdeviceptr p);
CUresult kp_own_mem_info(size_t *free_bytes, size_t *total_bytes); /* cuMemGetInfo_v2: the driver's */
CUresult kp_own_ipc_handle(CUipcMemHandle *handle, CUdeviceptr p); /* owned memory: NOT_SUPPORTED */
/* Contexts that end take their memory with them.  These do not pass the gate; they wait for a pager
 * that is at work. */
void kp_own_context_seen(CUcontext ctx, CUdevice device); /* made or retained: its work is waited for */
/* The same of a green context, whose memory is its device's primary context's. */
void kp_own_green_seen(CUgreenCtx green, CUdevice device);
CUresult kp_own_green_destroy(CUgreenCtx green);  /* cuGreenCtxDestroy */
CUresult kp_own_context_destroy(CUcontext ctx);   /* cuCtxDestroy_v2 */
CUresult kp_own_primary_release(CUdevice device); /* cuDevicePrimaryCtxRelease_v2 */
CUresult kp_own_primary_reset(CUdevice device);   /* cuDevicePrimaryCtxReset_v2 */
CUresult kp_own_peer_enabled(CUcontext peer);     /* after cuCtxEnablePeerAccess(peer) succeeded */

/* ---- what is not owned ----------------------------------------------------------------------------- */

enum kp_foreign {
    KP_FOREIGN_POOL,     /* stream-ordered allocations */
    KP_FOREIGN_MANAGED,  /* managed memory */
    KP_FOREIGN_ARRAY,    /* arrays and textures' memory */
    KP_FOREIGN_VMM,      /* the program's own cuMemCreate */
    KP_FOREIGN_IPC,      /* shared with other processes, or asked to be */
    KP_FOREIGN_GRAPH,    /* allocated by graph nodes */
    KP_FOREIGN_EXTERNAL, /* imported from Vulkan, OpenGL and the like */
    KP_FOREIGN_LEGACY,   /* allocated through calls of CUDA 2 that Kiwi does not serve */
    KP_FOREIGN_GPU,      /* on another GPU than the one Kiwi is linked for */
    KP_FOREIGN_PLAIN,    /* allocations that the driver would not back with VMM */
    KP_FOREIGN_KINDS
};
const char *kp_foreign_name(enum kp_foreign kind);
/* Bytes where they are known, else a count; negative when given back. */
void kp_own_seen_foreign(enum kp_foreign kind, int64_t bytes_or_count);

/* ---- books ----------------------------------------------------------------------------------------- */

struct kp_books {
    uint64_t owned;    /* physical bytes behind live allocations, wherever they are */
    uint64_t resident; /* of these, in the GPU */
    uint64_t out;      /* of these, in host memory only */
    uint64_t unowned[KP_FOREIGN_KINDS];
    uint64_t small_overhead; /* owned, but not asked for: rounding and free slots */
};
void kp_own_books(struct kp_books *books);

/* The GPU whose memory is owned: the first one used.  By start.c; else the first allocation's. */
void kp_own_start(CUdevice device);

#endif
