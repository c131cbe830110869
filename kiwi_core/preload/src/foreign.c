/* Memory that Kiwi cannot own: what there is of it now, by address or handle, so that the books fall
 * when it is given back. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>

#include "hooks.h"
#include "log.h"

#define BUCKETS 1024

static struct item {
    struct item *next;
    uint64_t key, bytes;
    enum kp_foreign kind;
} *buckets[BUCKETS];
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;

static struct item **bucket_of(uint64_t key) {
    return &buckets[(key * 0x9e3779b97f4a7c15ull) >> 54];
}

void kp_foreign_came(enum kp_foreign kind, uint64_t key, uint64_t bytes) {
    if (kp_disabled()) return;
    struct item *new = malloc(sizeof *new);
    kp_own_seen_foreign(kind, (int64_t)bytes);
    if (!new) return; /* it stays on the books: too much there does no harm */
    struct item **bucket = bucket_of(key);
    pthread_mutex_lock(&mu);
    *new = (struct item){*bucket, key, bytes, kind};
    *bucket = new;
    pthread_mutex_unlock(&mu);
}

bool kp_foreign_gone(enum kp_foreign kind, uint64_t key) {
    if (kp_disabled()) return false;
    pthread_mutex_lock(&mu);
    struct item **at = bucket_of(key);
    while (*at && ((*at)->key != key || (*at)->kind != kind)) at = &(*at)->next;
    struct item *found = *at;
    if (found) *at = found->next;
    pthread_mutex_unlock(&mu);
    if (!found) return false;
    kp_own_seen_foreign(kind, -(int64_t)found->bytes);
    free(found);
    return true;
}

/* The generated wrappers know no types, so not the owner's names either. */
void kp_wrapped_foreign(int count) {
    static const enum kp_foreign kinds[] = KP_COUNTED;
    kp_own_seen_foreign(kinds[count], 1);
}
