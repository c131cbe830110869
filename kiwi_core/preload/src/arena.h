/* Host memory for what is paged out: pieces of at most 1 GiB, pinned in the background before they
 * are needed, handed out in units of 2 MiB.
 *
 * Nothing is pinned on the switch path: where no pinned piece is free, a pageable one is added, which is
 * pinned in the background when all memory is in the GPU again.
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
};
struct kp_copy { /* the host side of a chunk */
    unsigned count;
    struct kp_extent *extents;
};

struct kp_arena_books {
    uint64_t pinned, pageable; /* what there is */
    uint64_t used;             /* handed out */
    uint64_t limit;
    uint64_t refused; /* pieces that could not be pinned */
};

/* By the link: pin in the background from now on (a daemon is there that may page us out). */
void kp_arena_enable(bool on);
/* By the link: how much host memory may be held beforehand, for speed.  What is above it and free is
 * given back in the background; a way out takes what it needs all the same. */
void kp_arena_allow(uint64_t bytes);
/* By tests: never more than that, whatever it is for. */
void kp_arena_limit(uint64_t bytes);
/* By the owner, when that changed: so much may have to go out.  Far more than that is given back. */
void kp_arena_aim(uint64_t bytes);
/* By the pager: on, the arena's thread makes no call to the driver from here until it is off again. False
 * at until_ns (CLOCK_MONOTONIC): it is in one still. */
bool kp_arena_stop(bool on, int64_t until_ns);

void kp_arena_wake(void); /* there is a new context to prepare for */
/* By a pass that is over: pageable pieces that it left free may be pinned. */
void kp_arena_moved(void);

bool kp_arena_take(struct kp_copy *copy, size_t bytes); /* false: nothing was taken */
void kp_arena_give(struct kp_copy *copy);
uint64_t kp_arena_room(void); /* bytes that could be taken now */
void kp_arena_context_gone(CUcontext ctx);
void kp_arena_books(struct kp_arena_books *out);

/* ---- host_memory.c ---- */
void *kp_host_map(size_t bytes, int numa_node); /* NULL: no address space; pages come on touch */
void kp_host_touch(void *at, size_t bytes);
void kp_host_unmap(void *at, size_t bytes);
uint64_t kp_host_available(void); /* what the machine and our control group can still give */
bool kp_host_to_spare(uint64_t bytes); /* so much may be taken for speed alone */
int kp_host_numa_node(CUdevice device); /* -1: not known */

#endif
