/* Host memory for what is paged out: pieces of at most 1 GiB, pinned in the background before they
 * are needed, and handed out in units of 2 MiB.
 *
 * Nothing is pinned on the switch path: where no pinned piece is free, the arena adds a pageable one and
 * pins it in the background when all memory is in the GPU again.
 */
#ifndef KP_ARENA_H
#define KP_ARENA_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KP_ARENA_UNIT ((size_t)2 << 20)

struct kp_extent {
    char *at;
    size_t bytes;
    size_t ahead; /* bytes from `at` on that this pass will use, the extent's included; 0: it is pinned */
};
struct kp_copy { /* the host copy of a chunk */
    unsigned count;
    struct kp_extent *extents;
};

struct kp_arena_books {
    uint64_t pinned, pageable; /* what exists */
    uint64_t used;             /* handed out */
    uint64_t refused; /* pieces that could not be pinned */
};

/* Switches pinning in the background on or off. Called by the link: on when a daemon may page us out. */
void kp_arena_enable(bool on);
/* Limits the host memory that is held in advance, for speed. Called by the link. Free memory above the limit
 * is given back in the background; a page-out takes what it needs all the same. */
void kp_arena_allow(uint64_t bytes);
/* Pins nothing more before the next kp_arena_allow. Called by the link when a daemon welcomes it: the first limit
 * comes a quarter of a second later, and is often less than what would have been pinned by then. */
void kp_arena_await_limit(void);
/* Sets how much memory may have to be paged out. Called by the owner when that changes. Memory far above it is
 * given back. */
void kp_arena_aim(uint64_t bytes);
/* Keeps the arena's thread from calling the driver while `on` holds. Called by the pager. Returns false if the
 * thread is still in a call at until_ns (CLOCK_MONOTONIC). */
bool kp_arena_stop(bool on, int64_t until_ns);

/* Called when there is a new context, or a pass is over: the pageable pieces that it left free may be pinned. */
void kp_arena_wake(void);
/* Called by the pager thread when it begins to take `bytes` for a page-out: where that needs new memory, its pages are
 * faulted in ahead of the copies. 0: nothing more is taken; call it before what was taken is given back. */
void kp_arena_expect(uint64_t bytes);
bool kp_arena_take(struct kp_copy *copy, size_t bytes); /* false: nothing was taken; for the pager thread */
bool kp_arena_take_pinned(struct kp_copy *copy, size_t bytes); /* never adds a piece, nor takes pageable memory */
void kp_arena_give(struct kp_copy *copy);
uint64_t kp_arena_room(void); /* returns the bytes that can be taken now */
void kp_arena_context_gone(CUcontext ctx);
void kp_arena_books(struct kp_arena_books *out);

/* ---- host_memory.c ---- */
void *kp_host_map(size_t bytes, int numa_node); /* NULL: no address space; pages are allocated on touch */
void kp_host_unmap(void *at, size_t bytes);
uint64_t kp_host_available(void); /* returns what the machine and our control group can still give */
bool kp_host_to_spare(uint64_t bytes); /* true: `bytes` may be taken for speed alone */
int kp_host_numa_node(CUdevice device); /* -1: not known */

#endif
