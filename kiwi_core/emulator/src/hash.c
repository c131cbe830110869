/* The built-in kernel "kiwi_hash_leaves": one digest of 128 bits for each leaf of 2 MiB, as the code
 * of the same name does on a GPU (kiwi_core/preload/src/cuda/hash.cu). */
#include <string.h>

#include "emu.h"

#define THREADS 256u
#define ROWS 512u
#define ROW_KEYS 2056u
#define LEAF ((uint64_t)THREADS * ROWS * 16)
#define P ((1ull << 61) - 1)

uint64_t ke_hash_leaf_bytes(void) { return LEAF; }
uint64_t ke_hash_key_bytes(void) { return ROW_KEYS * 4 + 2 * THREADS * 8 * 8; }

static uint64_t times(uint64_t key, uint32_t x) { /* modulo P */
    unsigned __int128 n = (unsigned __int128)key * x;
    uint64_t sum = ((uint64_t)n & P) + (uint64_t)(n >> 61);
    return sum >= P ? sum - P : sum;
}

void ke_hash_leaf(const void *leaf, const void *keys, uint64_t digest[2]) {
    static __thread uint64_t acc[4][THREADS];
    const uint32_t *row_keys = keys, (*row)[4] = leaf;
    const uint64_t *last = (const uint64_t *)((const char *)keys + ROW_KEYS * 4);
    memset(acc, 0, sizeof acc);
    for (uint32_t j = 0; j < ROWS; j++, row += THREADS) {
        for (uint32_t c = 0; c < 4; c++) {
            const uint32_t *k = row_keys + 4 * j + 2 * c;
            for (uint32_t t = 0; t < THREADS; t++)
                acc[c][t] += (uint64_t)(row[t][0] + k[0]) * (uint32_t)(row[t][1] + k[1]) +
                             (uint64_t)(row[t][2] + k[2]) * (uint32_t)(row[t][3] + k[3]);
        }
    }
    for (uint32_t o = 0; o < 2; o++) {
        uint64_t sum = 0;
        for (uint32_t t = 0; t < THREADS; t++) {
            for (uint32_t c = 0; c < 4; c++) {
                const uint64_t *k = last + (o * THREADS + t) * 8 + 2 * c;
                sum = (sum + times(k[0], (uint32_t)acc[c][t])) % P;
                sum = (sum + times(k[1], (uint32_t)(acc[c][t] >> 32))) % P;
            }
        }
        digest[o] = sum;
    }
}
