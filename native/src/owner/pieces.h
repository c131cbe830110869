/* The pieces of the arena; for arena.c and pinning.c only. */
#ifndef KP_PIECES_H
#define KP_PIECES_H

#include <pthread.h>

#include "owner/arena.h"

struct kp_piece {
    struct kp_piece *next;
    char *base;
    size_t units, free_units;
    bool pinned;
    bool busy;  /* the background thread is registering or unregistering the piece */
    bool stuck; /* the driver refused to unregister the piece: it is kept for ever */
    CUcontext ctx;
    unsigned char taken[]; /* a byte per unit */
};

extern pthread_mutex_t kp_arena_mu; /* guards all of this; may be taken under kp_table_mu, never around it */
extern struct kp_piece *kp_pieces;
extern struct kp_arena_books kp_arena_totals;
extern int kp_arena_node; /* NUMA node; -1: not known */

size_t kp_piece_bytes(void);    /* returns the size of a new piece */
uint64_t kp_arena_total_bytes(void); /* returns the bytes of all pieces */
uint64_t kp_arena_growth(void); /* returns the bytes of new pieces that the machine allows */
uint64_t kp_arena_advance_bytes(void); /* returns the bytes of pieces that may be held in advance */
struct kp_piece *kp_piece_grow(size_t need); /* adds a pageable piece; NULL: not possible */
struct kp_piece *kp_piece_of_size(size_t bytes);
void kp_piece_count(struct kp_piece *p, bool pinned); /* records that p became pinned or pageable */

/* ---- pages.c ---- */
/* Has the system put pages behind the memory, whose contents may be lost. Returns false if the system has none: the
 * memory must not be used then. */
bool kp_pages_fault_in(char *at, size_t bytes);
/* Waits until the pages of this memory are there. Pages of `ahead` bytes from `at` on are faulted in meanwhile and
 * afterwards, until they are there or kp_pages_end is called. Returns false if the system has no memory for them. For
 * the pager thread, as is the next one. */
bool kp_pages_need(char *at, size_t bytes, size_t ahead);
void kp_pages_end(void); /* breaks off, and returns when no thread touches these pages any more */

void kp_pinning_wake(void);     /* wakes the background thread: a piece may have to be pinned or freed */

#endif
