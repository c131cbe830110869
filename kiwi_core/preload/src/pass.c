#include "pass.h"

#include <stdio.h>
#include <stdlib.h>

#include "kiwi_preload.h"
#include "real.h"

/* A context that is just ending is not held, and takes its blocks with it at any time. */
static bool held(const struct kp_pass *p, const struct kp_ctx *ctx) {
    for (size_t i = 0; i < p->context_count; i++)
        if (p->contexts[i] == ctx) return true;
    return false;
}

static void remember(struct kp_block *b, void *arg) {
    struct kp_pass *p = arg;
    if (held(p, b->ctx)) p->blocks[p->block_count++] = b;
}

bool kp_pass_begin(struct kp_pass *p, int64_t until_ns, struct kp_outcome *o) {
    *o = (struct kp_outcome){.what = KP_MOVED, .reason = ""};
    *p = (struct kp_pass){.began_ns = kp_now_ns(), .until_ns = until_ns, .outcome = o, .want = UINT64_MAX};
    kp_own_bury(NULL);
    p->context_count = kp_ctx_hold_all(&p->contexts, true);
    pthread_mutex_lock(&kp_table_mu);
    p->blocks = calloc(kp_table_count() + 1, sizeof *p->blocks);
    if (p->blocks) {
        kp_table_each(remember, p);
        kp_moving = true;
    }
    pthread_mutex_unlock(&kp_table_mu);
    return p->blocks != NULL;
}

void kp_pass_end(struct kp_pass *p) {
    pthread_mutex_lock(&kp_table_mu);
    kp_moving = false;
    pthread_mutex_unlock(&kp_table_mu);
    for (size_t i = 0; i < p->context_count; i++) kp_ctx_let_go(p->contexts[i]);
    free(p->contexts);
    free(p->blocks);
    kp_own_bury(NULL);
    kp_arena_moved();
    p->outcome->bytes = p->bytes;
    p->outcome->elapsed_ns = kp_now_ns() - p->began_ns;
}

void kp_pass_refuse(struct kp_outcome *o, const char *reason, const char *what, CUresult rc) {
    const char *words = NULL;
    if (rc != CUDA_SUCCESS) kp_real.cuGetErrorString(rc, &words);
    o->what = KP_REFUSED;
    o->reason = reason;
    snprintf(o->detail, sizeof o->detail, "%s%s%s", what, words ? ": " : "", words ? words : "");
}

static bool dead(const struct kp_block *b) { return __atomic_load_n(&b->dead, __ATOMIC_ACQUIRE); }

CUresult kp_pass_each(struct kp_pass *p, struct kp_lane *lane, struct kp_ctx *ctx, kp_chunk_fn fn) {
    CUresult rc = CUDA_SUCCESS;
    for (size_t i = 0; i < p->block_count && rc == CUDA_SUCCESS; i++) {
        struct kp_block *b = p->blocks[i];
        CUdeviceptr at = b->addr;
        if (b->ctx != ctx || dead(b)) continue;
        for (unsigned k = 0; k < b->chunk_count && rc == CUDA_SUCCESS; at += b->chunks[k++].bytes)
            rc = fn(p, lane, (struct kp_flight){b, &b->chunks[k], at});
    }
    return rc;
}
