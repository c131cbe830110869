/* Memory that Kiwi owns: the functions that the wrappers call instead of the driver.
 *
 * An allocation gets an address range of its own (or a slot of a slab), which never changes; the physical
 * memory behind it comes from the driver's virtual memory management and can be taken away and put back.
 * Requests for memory that cannot be owned are passed on to the driver; the memory is counted by kind.
 */
#ifndef KP_OWN_H
#define KP_OWN_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- called by the wrappers; each returns what the driver would return ----------------------------- */

CUresult kp_own_alloc(CUdeviceptr *p, size_t bytes); /* cuMemAlloc_v2; inside the gate */
CUresult kp_own_alloc_pitch(CUdeviceptr *p, size_t *pitch, size_t width, size_t height, unsigned elem);
/* cuMemFree_v2. Is not gated: a free must work while memory is out, and while a pager moves it. A pointer that
 * is not ours goes to the driver. */
CUresult kp_own_free(CUdeviceptr p);
CUresult kp_own_free_async(CUdeviceptr p, CUstream stream); /* owned memory: like kp_own_free */
/* Gives back what was freed while a stream was being captured. Called when no capture is open any more; waits for the
 * GPU, as each of the frees would have done. */
void kp_own_captures_over(void);
bool kp_own_has(CUdeviceptr p);                             /* true: p points into memory that is ours */
CUresult kp_own_range(CUdeviceptr *base, size_t *size, CUdeviceptr p); /* cuMemGetAddressRange_v2 */
CUresult kp_own_pointer_attribute(void *data, CUpointer_attribute what, CUdeviceptr p);
CUresult kp_own_pointer_attributes(unsigned n, CUpointer_attribute *what, void **data, CUdeviceptr p);
CUresult kp_own_ipc_handle(CUipcMemHandle *handle, CUdeviceptr p); /* owned memory: NOT_SUPPORTED */
uint64_t kp_own_ipc_refused(void); /* how often that was */
/* A context that is destroyed takes its memory with it. The functions below are not gated; they wait for a
 * pager that is at work. */
void kp_own_context_seen(CUcontext ctx, CUdevice device); /* made or retained: we wait for its work */
/* Records a green context, whose memory belongs to its device's primary context. */
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
    KP_FOREIGN_ARRAY,    /* memory of arrays and textures */
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
/* Counts memory that is not owned: bytes where they are known, else a count; negative when given back. */
void kp_own_seen_foreign(enum kp_foreign kind, int64_t bytes_or_count);

/* ---- books ----------------------------------------------------------------------------------------- */

struct kp_books {
    uint64_t owned;    /* physical bytes behind live allocations, wherever they are */
    uint64_t resident; /* owned bytes in the GPU */
    uint64_t out;      /* owned bytes in host memory only */
    uint64_t unowned[KP_FOREIGN_KINDS];
    uint64_t small_overhead; /* owned bytes that nobody asked for: rounding and free slots */
    uint64_t driven; /* allocations that are left to the driver, because this library is only a gate */
    uint64_t shared; /* bytes of `ipc` that are this process's own allocations */
};
void kp_own_books(struct kp_books *books);
/* The GPU memory of this process by its own count, contexts apart. NVML is read twice a second, and sees no peak that
 * is shorter; every allocation passes here. */
struct kp_need {
    uint64_t held;   /* now, in the GPU */
    uint64_t peak;   /* the most since the last kp_need_take */
    uint64_t lacked; /* the most that an allocation would have led to for which there was no memory, or less than the
                      * program would take with the GPU for itself; 0: there was enough for each */
};
void kp_need_take(struct kp_need *need);
void kp_need_grew(uint64_t bytes);      /* after the books have grown by an allocation */
void kp_need_told(uint64_t free_bytes, uint64_t total_bytes); /* after the program was told what is free */
void kp_need_lacked(uint64_t bytes);    /* after an allocation of so much has failed for lack of memory */

/* Sets the GPU whose memory is owned: the first one used. Called by start.c, or else by the first allocation. */
void kp_own_start(CUdevice device);

#endif
