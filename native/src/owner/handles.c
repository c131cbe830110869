/* The hash of names, and the mappings by address. */
#include "owner/handles.h"

#include <stdlib.h>
#include <string.h>

/* The driver's handles are addresses of this process, or small numbers: none begins like this. */
#define NAMES ((CUmemGenericAllocationHandle)0x6b77 << 48)
#define FEWEST_BUCKETS 64

static struct kp_object **buckets;
static size_t bucket_count, object_count;
static struct kp_mapping **mappings;
static size_t mapping_count, mapping_room;

/* ---- names ---- */

bool kp_is_name(CUmemGenericAllocationHandle handle) { return handle >> 48 == NAMES >> 48; }

static struct kp_object **bucket_of(CUmemGenericAllocationHandle name) { /* names are numbers in a row */
    return &buckets[name & (bucket_count - 1)];
}

struct kp_object *kp_object_named(CUmemGenericAllocationHandle handle) {
    if (!kp_is_name(handle) || !bucket_count) return NULL;
    struct kp_object *o = *bucket_of(handle);
    while (o && o->name != handle) o = o->next;
    return o;
}

static void insert(struct kp_object *o) {
    struct kp_object **bucket = bucket_of(o->name);
    o->next = *bucket;
    *bucket = o;
}

static bool make_buckets(void) { /* twice as many, or the first ones; false: no memory */
    size_t before = bucket_count, count = before ? 2 * before : FEWEST_BUCKETS;
    struct kp_object **old = buckets, **new = calloc(count, sizeof *new);
    if (!new) return false;
    buckets = new;
    bucket_count = count;
    for (size_t i = 0; i < before; i++) {
        for (struct kp_object *o = old[i], *next; o; o = next) {
            next = o->next;
            insert(o);
        }
    }
    free(old);
    return true;
}

bool kp_object_add(struct kp_object *o) {
    static CUmemGenericAllocationHandle last = NAMES;
    if (object_count >= bucket_count && !make_buckets() && !bucket_count) return false;
    o->name = ++last;
    insert(o);
    object_count++;
    return true;
}

bool kp_object_over(struct kp_object *o) {
    if (o->references || o->mappings) return false;
    struct kp_object **at = bucket_of(o->name);
    while (*at != o) at = &(*at)->next;
    *at = o->next;
    object_count--;
    return true;
}

void kp_vmm_each(void (*fn)(struct kp_block *b, void *arg), void *arg) {
    for (size_t i = 0; i < bucket_count; i++) {
        for (struct kp_object *o = buckets[i]; o; o = o->next) fn(o->block, arg);
    }
}

size_t kp_vmm_count(void) { return object_count; }

/* ---- mappings ---- */

size_t kp_mapping_from(CUdeviceptr at) {
    size_t low = 0, high = mapping_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (mappings[middle]->at + mappings[middle]->bytes <= at) low = middle + 1;
        else high = middle;
    }
    return low;
}

struct kp_mapping *kp_mapping_number(size_t i) { return i < mapping_count ? mappings[i] : NULL; }

struct kp_mapping *kp_mapping_at(CUdeviceptr at) {
    struct kp_mapping *m = kp_mapping_number(kp_mapping_from(at));
    return m && m->at <= at ? m : NULL;
}

bool kp_mapping_add(struct kp_mapping *m) {
    if (mapping_count == mapping_room) {
        size_t room = mapping_room ? 2 * mapping_room : 64;
        struct kp_mapping **more = realloc(mappings, room * sizeof *more);
        if (!more) return false;
        mappings = more;
        mapping_room = room;
    }
    size_t i = kp_mapping_from(m->at);
    memmove(mappings + i + 1, mappings + i, (mapping_count++ - i) * sizeof *mappings);
    mappings[i] = m;
    m->next = m->of->mappings;
    m->of->mappings = m;
    return true;
}

void kp_mapping_remove(struct kp_mapping *m) {
    size_t i = kp_mapping_from(m->at);
    struct kp_mapping **at = &m->of->mappings;
    while (*at != m) at = &(*at)->next;
    *at = m->next;
    memmove(mappings + i, mappings + i + 1, (--mapping_count - i) * sizeof *mappings);
    free(m->access);
    free(m);
}
