/* The pieces of the arena, for the two files that it is made of. */
#ifndef KP_PIECES_H
#define KP_PIECES_H

#include <pthread.h>

#include "arena.h"

struct kp_piece {
    struct kp_piece *next;
    char *base;
    size_t units, free_units;
    bool pinned;
    bool busy;  /* the background thread registers or unregisters it */
    bool stuck; /* the driver would not unregister it: kept for ever */
    CUcontext ctx;
    unsigned char taken[]; /* a byte per unit */
};

extern pthread_mutex_t kp_arena_mu; /* for all of this; taken inside kp_table_mu, never around it */
extern struct kp_piece *kp_pieces;
extern struct kp_arena_books kp_arena_totals;
extern int kp_arena_node; /* of NUMA; -1: not known */

size_t kp_piece_bytes(void);    /* of a new piece */
uint64_t kp_arena_there(void);  /* all pieces */
uint64_t kp_arena_growth(void); /* new pieces that limit and machine allow */
uint64_t kp_arena_most(void);   /* pieces that may stay, or be made, beforehand */
struct kp_piece *kp_piece_grow(size_t need); /* a pageable one; NULL: not possible */
struct kp_piece *kp_piece_exactly(size_t bytes);
void kp_piece_count(struct kp_piece *p, bool pinned); /* it changed sides */
void kp_pinning_wake(void);     /* something may be to free */

#endif
