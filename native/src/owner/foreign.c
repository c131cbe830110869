/* Records memory that Kiwi does not own by its address or handle, so that the books fall when it is given back. */
#include "owner/foreign.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/daemon.h"
#include "base/kiwi_preload.h"
#include "base/real.h"
#include "owner/blocks.h"

#define BUCKETS 1024

static struct item {
    struct item *next;
    uint64_t key, bytes;
    enum kp_foreign kind; /* KP_FOREIGN_KINDS: not foreign, but left to the driver */
    CUcontext ctx;        /* of that memory */
} *buckets[BUCKETS];
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;

static struct item **bucket_of(uint64_t key) {
    return &buckets[(key * 0x9e3779b97f4a7c15ull) >> 54];
}

static void record(struct item *new) {
    struct item **bucket = bucket_of(new->key);
    pthread_mutex_lock(&mu);
    new->next = *bucket;
    *bucket = new;
    pthread_mutex_unlock(&mu);
}

/* Takes the record off the list; the caller frees it. NULL: there is none. */
static struct item *take(enum kp_foreign kind, uint64_t key) {
    pthread_mutex_lock(&mu);
    struct item **at = bucket_of(key);
    while (*at && ((*at)->key != key || (*at)->kind != kind)) at = &(*at)->next;
    struct item *found = *at;
    if (found) *at = found->next;
    pthread_mutex_unlock(&mu);
    return found;
}

void kp_foreign_added(enum kp_foreign kind, uint64_t key, uint64_t bytes) {
    if (kp_disabled()) return;
    struct item *new = malloc(sizeof *new);
    kp_own_seen_foreign(kind, (int64_t)bytes);
    if (!new) return; /* the memory stays on the books: too much there does no harm */
    *new = (struct item){.key = key, .bytes = bytes, .kind = kind};
    record(new);
}

bool kp_foreign_removed(enum kp_foreign kind, uint64_t key) {
    struct item *found = kp_disabled() ? NULL : take(kind, key);
    if (!found) return false;
    kp_own_seen_foreign(kind, -(int64_t)found->bytes);
    free(found);
    return true;
}

/* ---- memory that is left to the driver ---- */

static void driven_changed(int64_t bytes) {
    kp_books_add(&kp_totals.driven, bytes);
    if (bytes > 0) kp_need_grew((uint64_t)bytes);
    kp_daemon_books_changed();
}

void kp_driven_added(CUdeviceptr p, uint64_t bytes) {
    struct item *new = kp_disabled() ? NULL : malloc(sizeof *new);
    if (!new) return; /* NVML counts it all the same */
    *new = (struct item){.key = p, .bytes = bytes, .kind = KP_FOREIGN_KINDS};
    if (kp_real.cuCtxGetCurrent(&new->ctx) != CUDA_SUCCESS) new->ctx = NULL;
    driven_changed((int64_t)bytes);
    record(new);
}

void kp_driven_removed(CUdeviceptr p) {
    struct item *found = kp_disabled() ? NULL : take(KP_FOREIGN_KINDS, p);
    if (!found) return;
    driven_changed(-(int64_t)found->bytes);
    free(found);
}

void kp_driven_context_gone(CUcontext ctx) {
    int64_t bytes = 0;
    pthread_mutex_lock(&mu);
    for (size_t i = 0; i < BUCKETS; i++) {
        for (struct item **at = &buckets[i], *found; (found = *at);) {
            if (found->kind != KP_FOREIGN_KINDS || found->ctx != ctx) {
                at = &found->next;
                continue;
            }
            bytes += (int64_t)found->bytes;
            *at = found->next;
            free(found);
        }
    }
    pthread_mutex_unlock(&mu);
    driven_changed(-bytes);
}
