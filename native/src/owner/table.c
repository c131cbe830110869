/* The table of blocks by address: a treap, so that look-ups, insertions and removals take O(log n). */
#include "owner/blocks.h"

pthread_mutex_t kp_table_mu = PTHREAD_MUTEX_INITIALIZER;

static struct kp_block *root;
static size_t count;

static uint32_t next_weight(void) { /* xorshift: only the shape of the tree depends on it */
    static uint32_t x = 2463534242u;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return x;
}

/* Splits t into the blocks below addr and the rest. */
static void split(struct kp_block *t, CUdeviceptr addr, struct kp_block **low, struct kp_block **high) {
    while (t) {
        if (t->addr < addr) {
            *low = t;
            low = &t->right;
            t = t->right;
        } else {
            *high = t;
            high = &t->left;
            t = t->left;
        }
    }
    *low = *high = NULL;
}

static struct kp_block *join(struct kp_block *low, struct kp_block *high) {
    struct kp_block *top = NULL, **at = &top;
    while (low && high) {
        if (low->weight > high->weight) {
            *at = low;
            at = &low->right;
            low = low->right;
        } else {
            *at = high;
            at = &high->left;
            high = high->left;
        }
    }
    *at = low ? low : high;
    return top;
}

void kp_table_add(struct kp_block *b) {
    struct kp_block **at = &root;
    b->weight = next_weight();
    while (*at && (*at)->weight >= b->weight) at = b->addr < (*at)->addr ? &(*at)->left : &(*at)->right;
    split(*at, b->addr, &b->left, &b->right);
    *at = b;
    count++;
}

void kp_table_remove(struct kp_block *b) {
    struct kp_block **at = &root;
    while (*at && *at != b) at = b->addr < (*at)->addr ? &(*at)->left : &(*at)->right;
    if (!*at) return;
    *at = join(b->left, b->right);
    b->left = b->right = NULL;
    count--;
}

struct kp_block *kp_table_at(CUdeviceptr p) {
    struct kp_block *t = root, *best = NULL;
    while (t) {
        if (t->addr <= p) {
            best = t;
            t = t->right;
        } else {
            t = t->left;
        }
    }
    return best && p - best->addr < best->bytes ? best : NULL;
}

size_t kp_table_count(void) { return count; }

static void each(struct kp_block *t, void (*fn)(struct kp_block *, void *), void *arg) {
    while (t) { /* recursion on the left only: expected depth is logarithmic */
        each(t->left, fn, arg);
        fn(t, arg);
        t = t->right;
    }
}

void kp_table_each(void (*fn)(struct kp_block *b, void *arg), void *arg) { each(root, fn, arg); }
