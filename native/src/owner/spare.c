/* An H200 refused the checkpoint of a process that had filled the GPU to the last block (OUT_OF_MEMORY), and moved
 * processes that had left about 65 MiB. A process that fills the GPU would keep its memory there, and all
 * others out, until it ends. */
#include "owner/spare.h"

#include "base/kiwi_preload.h"
#include "base/real.h"
#include "gate/gate.h"

/* KP_ROOM_BYTES and KP_ROOM_SHARE are checkpoint_room_bytes and checkpoint_room_share of kiwi_core/config.py, which
 * _build.py hands to the compiler. */
#define BLOCK_BYTES (2ull << 20) /* smaller allocations come out of blocks that the driver has already */

bool kp_spare_touched(size_t bytes) {
    size_t free_bytes, total_bytes;
    if (bytes < BLOCK_BYTES || kp_disabled() || kp_gate_capturing()) return false;
    if (kp_real.cuMemGetInfo_v2(&free_bytes, &total_bytes) != CUDA_SUCCESS) return false;
    size_t share = total_bytes / KP_ROOM_SHARE;
    return free_bytes < (share < KP_ROOM_BYTES ? share : KP_ROOM_BYTES);
}
