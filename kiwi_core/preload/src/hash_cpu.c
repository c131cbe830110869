#include "hash.h"

#include <string.h>

#define COLUMNS 256
#define ROWS 512
#define VECTOR_WORDS 4
#define PASSES 4
#define ROW_KEYS 2056
#define PRIME ((1ull << 61) - 1)

static uint64_t modulo(unsigned __int128 n) { return (uint64_t)(n % PRIME); }

static void column(const uint32_t *words, const uint32_t *keys, uint64_t nh[PASSES]) {
    memset(nh, 0, PASSES * sizeof nh[0]);
    for (size_t row = 0; row < ROWS; row++) {
        const uint32_t *w = words + row * COLUMNS * VECTOR_WORDS, *k = keys + row * VECTOR_WORDS;
        for (int pass = 0; pass < PASSES; pass++, k += 2) {
            nh[pass] += (uint64_t)(uint32_t)(w[0] + k[0]) * (uint32_t)(w[1] + k[1]);
            nh[pass] += (uint64_t)(uint32_t)(w[2] + k[2]) * (uint32_t)(w[3] + k[3]);
        }
    }
}

void kp_hash_leaf(const void *leaf, const void *keys, struct kp_digest *out) {
    const uint64_t *second = (const uint64_t *)((const uint32_t *)keys + ROW_KEYS);
    *out = (struct kp_digest){{0, 0}};
    for (size_t t = 0; t < COLUMNS; t++) {
        uint64_t nh[PASSES];
        column((const uint32_t *)leaf + t * VECTOR_WORDS, keys, nh);
        for (int half = 0; half < 2; half++) {
            const uint64_t *k = second + ((size_t)half * COLUMNS + t) * 2 * PASSES;
            unsigned __int128 sum = out->half[half];
            for (int pass = 0; pass < PASSES; pass++, k += 2)
                sum += (unsigned __int128)k[0] * (uint32_t)nh[pass] + (unsigned __int128)k[1] * (nh[pass] >> 32);
            out->half[half] = modulo(sum);
        }
    }
}
