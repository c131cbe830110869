/* The device's half of hash.h: one digest of 128 bits for each leaf of 2 MiB.
 *
 * hash.ptx is what nvcc makes of this file (make -C ... is not needed to build Kiwi: the text is
 * committed, so that no CUDA compiler has to be there); see docs/preload.md for how to make it anew.
 */
typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256
#define ROWS 512 /* vectors of 16 bytes per thread */
#define ROW_KEYS 2056
#define P ((1ull << 61) - 1)

static __device__ __forceinline__ u64 fold(u64 low, u64 high) { /* modulo P, of less than 2^93 */
    u64 x = (low & P) + (low >> 61 | high << 3);
    return x >= P ? x - P : x;
}

static __device__ __forceinline__ u64 add(u64 a, u64 b) {
    u64 x = a + b;
    return x >= P ? x - P : x;
}

static __device__ __forceinline__ u64 product(u32 a, u32 b) { return (u64)a * b; }

extern "C" __global__ void __launch_bounds__(THREADS)
    kiwi_hash_leaves(const uint4 *data, u64 *digests, const u32 *keys) {
    __shared__ u32 row_keys[ROW_KEYS];
    __shared__ u64 sums[2][THREADS];
    const u32 t = threadIdx.x;
    const uint4 *leaf = data + (u64)blockIdx.x * THREADS * ROWS;
    for (u32 i = t; i < ROW_KEYS; i += THREADS) row_keys[i] = keys[i];
    __syncthreads();

    u64 acc[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (u32 j = 0; j < ROWS; j++) {
        const uint4 v = leaf[(u64)j * THREADS + t];
        const u32 *k = row_keys + 4 * j;
#pragma unroll
        for (u32 c = 0; c < 4; c++)
            acc[c] += product(v.x + k[2 * c], v.y + k[2 * c + 1]) +
                      product(v.z + k[2 * c + 2], v.w + k[2 * c + 3]);
    }

    const u64 *last = (const u64 *)(keys + ROW_KEYS);
    for (u32 o = 0; o < 2; o++) {
        const u64 *k = last + o * THREADS * 8 + t * 8;
        u64 sum = 0;
        for (u32 c = 0; c < 4; c++) {
            const u64 low = (u32)acc[c], high = acc[c] >> 32;
            sum = add(sum, fold(k[2 * c] * low, __umul64hi(k[2 * c], low)));
            sum = add(sum, fold(k[2 * c + 1] * high, __umul64hi(k[2 * c + 1], high)));
        }
        sums[o][t] = sum;
    }
    for (u32 n = THREADS / 2; n; n /= 2) {
        __syncthreads();
        if (t < n) {
            sums[0][t] = add(sums[0][t], sums[0][t + n]);
            sums[1][t] = add(sums[1][t], sums[1][t + n]);
        }
    }
    if (t == 0) {
        digests[2 * (u64)blockIdx.x] = sums[0][0];
        digests[2 * (u64)blockIdx.x + 1] = sums[1][0];
    }
}
