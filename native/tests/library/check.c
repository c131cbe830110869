/* Checks the books against the table. */
#include "owner/blocks.h"
#include "owner/own.h"
#include "testing.h"

static void recount(struct kp_block *b, void *arg) {
    struct kp_books *n = arg;
    n->owned += b->chunk_count && !b->stays ? b->bytes : 0;
    for (unsigned i = 0; i < b->chunk_count && !b->stays; i++) {
        const struct kp_chunk *c = &b->chunks[i];
        *(c->where == KP_IN ? &n->resident : &n->out) += c->bytes;
    }
    n->small_overhead += kp_block_overhead(b);
}

const char *kp_own_check(void) {
    struct kp_books n = {0}, said;
    pthread_mutex_lock(&kp_table_mu);
    kp_table_each(recount, &n);
    kp_vmm_each(recount, &n);
    pthread_mutex_unlock(&kp_table_mu);
    kp_own_books(&said);
    return n.owned != said.owned                      ? "owned"
           : n.resident != said.resident              ? "resident"
           : n.out != said.out                        ? "out"
           : n.small_overhead != said.small_overhead  ? "small_overhead"
                                                      : NULL;
}
