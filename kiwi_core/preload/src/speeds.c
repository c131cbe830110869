#include "speeds.h"

#include <stdlib.h>
#include <time.h>

#include "blocks.h"
#include "kiwi_preload.h"
#include "log.h"
#include "real.h"

#define MIB (1ull << 20)
#define MOST_BYTES (32 * MIB) /* milliseconds on any bus; what a copy costs beside its bytes is microseconds */
#define GPU_PARTS 1024        /* of a small GPU no more than that each way, */
#define LEAST_BYTES (2 * MIB) /* and below this it says nothing about large copies */
#define RUNS 3                /* the best of them: others may copy just then */
#define LIMIT_NS (2 * 1000000000ll)
#define POLL_NS 20000

enum { OUT = 1, IN = 2 };

struct probe {
    size_t bytes;
    CUdeviceptr device[2];
    struct kp_copy host[2];
    CUstream stream[2];
};

static CUresult ended(CUstream stream, int64_t until_ns) {
    CUresult rc;
    while ((rc = kp_real.cuStreamQuery(stream)) == CUDA_ERROR_NOT_READY && kp_now_ns() < until_ns)
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    return rc;
}

/* Bytes per second; 0: it did not work. */
static uint64_t once(const struct probe *p, int ways) {
    int64_t began_ns = kp_now_ns(), until_ns = began_ns + LIMIT_NS;
    CUresult rc = CUDA_SUCCESS;
    if (ways & OUT) rc = kp_real.cuMemcpyDtoHAsync_v2(p->host[0].extents->at, p->device[0], p->bytes, p->stream[0]);
    if (rc == CUDA_SUCCESS && ways & IN)
        rc = kp_real.cuMemcpyHtoDAsync_v2(p->device[1], p->host[1].extents->at, p->bytes, p->stream[1]);
    for (int i = 0; i < 2 && rc == CUDA_SUCCESS; i++) rc = ended(p->stream[i], until_ns);
    int64_t took_ns = kp_now_ns() - began_ns;
    uint64_t bytes = p->bytes * (ways == (OUT | IN) ? 2 : 1);
    return rc == CUDA_SUCCESS ? (uint64_t)((double)bytes * 1e9 / (double)(took_ns > 0 ? took_ns : 1)) : 0;
}

static uint64_t best(const struct probe *p, int ways) {
    uint64_t most = 0;
    for (int i = 0; i < RUNS; i++) {
        uint64_t speed = once(p, ways);
        if (!speed) return 0;
        if (speed > most) most = speed;
    }
    return most;
}

static bool take(struct probe *p) {
    for (int i = 0; i < 2; i++) {
        if (!kp_arena_take(&p->host[i], p->bytes)) return false;
        if (p->host[i].count != 1 || !kp_arena_is_pinned(&p->host[i])) return false;
    }
    for (int i = 0; i < 2; i++) {
        if (kp_real.cuMemAlloc_v2(&p->device[i], p->bytes) != CUDA_SUCCESS) return false;
        if (kp_real.cuStreamCreate(&p->stream[i], CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return false;
    }
    return true;
}

/* What a copy may still write to is kept for ever. */
static void give(struct probe *p) {
    for (int i = 0; i < 2; i++) {
        if (p->stream[i] && ended(p->stream[i], kp_now_ns() + LIMIT_NS) == CUDA_ERROR_NOT_READY) {
            kp_note("a copy to measure the bus does not end; its memory is left where it is");
            return;
        }
    }
    for (int i = 0; i < 2; i++) {
        if (p->stream[i]) kp_real.cuStreamDestroy_v2(p->stream[i]);
        if (p->device[i]) kp_real.cuMemFree_v2(p->device[i]);
        kp_arena_give(&p->host[i]);
    }
}

bool kp_speeds_measure(struct kp_speeds *s) {
    struct probe p = {.bytes = kp_gpu.total_bytes / GPU_PARTS / KP_ARENA_UNIT * KP_ARENA_UNIT};
    if (p.bytes < LEAST_BYTES) return false;
    if (p.bytes > MOST_BYTES) p.bytes = MOST_BYTES;
    struct kp_ctx **list;
    size_t n = kp_ctx_hold_all(&list, true);
    *s = (struct kp_speeds){0};
    if (n && kp_ctx_push(list[0]) == CUDA_SUCCESS) {
        if (take(&p)) {
            s->out = best(&p, OUT);
            s->in = s->out ? best(&p, IN) : 0;
            s->both = s->in ? best(&p, OUT | IN) : 0;
        }
        give(&p);
        kp_ctx_pop(list[0]);
    }
    for (size_t i = 0; i < n; i++) kp_ctx_let_go(list[i]);
    free(list);
    return s->both != 0;
}
