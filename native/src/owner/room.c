/* Asks the daemon for room and tries again, in the same way for all calls that allocate GPU memory. */
#include "owner/room.h"

#include <time.h>

#include "base/daemon.h"
#include "base/kiwi_preload.h"
#include "owner/blocks.h"

/* The wait may last until another notebook's burst ends; the daemon refuses earlier than this. */
#define ROOM_WAIT_NS (15ll * 60 * 1000000000)
/* Other processes can take the room before we allocate it: we ask again, but not for ever. */
#define ROOM_REQUESTS 32
/* The driver scrubs freed memory before it can be allocated again. */
#define SCRUB_WAIT_NS 200000000ll
#define SCRUB_STEP_NS 5000000l

static bool ask(struct kp_room *room) {
    size_t g = kp_gpu.granularity ? kp_gpu.granularity : 1, bytes = (room->bytes + g - 1) / g * g;
    if (!room->asks || room->elsewhere || bytes > kp_gpu.total_bytes) return false;
    if (!room->until_ns) room->until_ns = kp_now_ns() + ROOM_WAIT_NS;
    if (room->requests++ == ROOM_REQUESTS || !kp_daemon_want_room(bytes, room->until_ns)) return false;
    room->scrubbed_ns = kp_now_ns() + SCRUB_WAIT_NS;
    return true;
}

bool kp_room_again(struct kp_room *room, CUresult result) {
    if (result != CUDA_ERROR_OUT_OF_MEMORY) return false;
    if (kp_now_ns() >= room->scrubbed_ns) return ask(room);
    nanosleep(&(struct timespec){.tv_nsec = SCRUB_STEP_NS}, NULL);
    return true;
}
