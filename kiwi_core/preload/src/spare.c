/* An H200 refused the checkpoint of a process that had filled the GPU to the last block (OUT_OF_MEMORY), and moved
 * processes that had left about 65 MiB. Such a process would hold its memory against all others until it ends. */
#include "spare.h"

#include "gate.h"
#include "kiwi_preload.h"
#include "real.h"

#define SPARE_MAX_BYTES (64ull << 20)
#define SPARE_SHARE 64 /* of a small GPU, at most one part in so many */
#define BLOCK_BYTES (2ull << 20) /* smaller allocations come out of blocks that the driver has already */

bool kp_spare_touched(size_t bytes) {
    size_t free_bytes, total_bytes;
    if (bytes < BLOCK_BYTES || kp_disabled() || kp_gate_capturing()) return false;
    if (kp_real.cuMemGetInfo_v2(&free_bytes, &total_bytes) != CUDA_SUCCESS) return false;
    size_t share = total_bytes / SPARE_SHARE;
    return free_bytes < (share < SPARE_MAX_BYTES ? share : SPARE_MAX_BYTES);
}
