/* Memory that others can reach past the gate: another process, or a device by itself. It never moves again, and counts
 * as what Kiwi does not own. */
#include "base/kiwi_preload.h"
#include "owner/handles.h"
#include "owner/vmm.h"

void kp_block_stays(struct kp_block *b, enum kp_foreign kind) {
    if (b->stays || (!b->ctx && !b->object)) return;
    for (unsigned i = 0; i < b->chunk_count; i++)
        if (b->chunks[i].where == KP_OUT) return; /* its context has failed: nobody reaches anything there */
    kp_block_count(b, -1);
    b->stays = true;
    b->foreign = kind;
    kp_block_count(b, 1);
}

void kp_stays_named(CUmemGenericAllocationHandle name) {
    pthread_mutex_lock(&kp_table_mu);
    struct kp_object *o = kp_object_named(name);
    if (o) kp_block_stays(o->block, KP_FOREIGN_IPC);
    pthread_mutex_unlock(&kp_table_mu);
}

struct range {
    CUdeviceptr at, end;
};

static void stays_in(struct kp_block *b, void *arg) {
    const struct range *r = arg;
    if (b->addr < r->end && r->at < b->addr + b->bytes) kp_block_stays(b, KP_FOREIGN_IPC);
}

void kp_stays_at(CUdeviceptr at, size_t bytes) {
    struct range r = {at, at + bytes};
    struct kp_mapping *m;
    pthread_mutex_lock(&kp_table_mu);
    kp_table_each(stays_in, &r);
    for (size_t i = kp_mapping_from(at); (m = kp_mapping_number(i)) && m->at < r.end; i++)
        kp_block_stays(m->of->block, KP_FOREIGN_IPC);
    pthread_mutex_unlock(&kp_table_mu);
}
