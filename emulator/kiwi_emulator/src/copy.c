/* Copies and fills, and the apparent speed of copies between host and device. */
#include <string.h>
#include <sys/mman.h>

#include "emu.h"

#define CHUNK (4ull << 20)            /* so that a change of speed takes effect soon */
#define NAP_NS 20000000ull            /* likewise while waiting */

void ke_pace(struct ke_pace *pace, uint64_t bytes) {
    if (pace->start_ns == 0) pace->start_ns = ke_now_ns();
    pace->bytes += bytes;
    for (;;) {
        uint64_t speed = __atomic_load_n(&ke.state->copy_bytes_per_s, __ATOMIC_RELAXED);
        if (speed == 0) return;
        uint64_t due = (uint64_t)((double)pace->bytes / (double)speed * 1e9);
        uint64_t gone = ke_now_ns() - pace->start_ns;
        if (gone >= due) return;
        ke_sleep_ns(due - gone < NAP_NS ? due - gone : NAP_NS);
    }
}

/* The ranges that this thread's job has used: if one is unmapped meanwhile, the job has failed. */
#define TOUCHED_MAX 8 /* ranges; a built-in kernel has three, and the rows of a fill are adjacent */
static __thread struct {
    CUdeviceptr at;
    size_t n;
    bool write;
} touched[TOUCHED_MAX];
static __thread unsigned touched_count;

void ke_touch_nothing(void) { touched_count = 0; }

static void touch(CUdeviceptr p, size_t n, bool write) {
    unsigned i = touched_count < TOUCHED_MAX ? touched_count++ : TOUCHED_MAX - 1;
    touched[i].at = p, touched[i].n = n, touched[i].write = write;
}

bool ke_touched_all_there(void) {
    unsigned count = touched_count;
    for (unsigned i = 0; i < count; i++) {
        if (ke_place(touched[i].at, touched[i].n, touched[i].write) == KE_PLACE_BAD) return false;
    }
    return true;
}

/* Returns the place of [p, p + n). Device memory may span adjacent mappings. */
enum ke_place ke_place(CUdeviceptr p, size_t n, bool write) {
    if (p < KE_DEVICE_BASE || p >= KE_DEVICE_BASE + KE_DEVICE_SPAN) return KE_PLACE_HOST;
    ke_mu_lock();
    CUdeviceptr at = p, end = p + n;
    int need = write ? PROT_WRITE : PROT_READ;
    while (at < end) {
        struct ke_map *m = ke_map_at(at);
        if (!m || !(m->prot & need)) break;
        at = m->addr + m->size;
    }
    ke_mu_unlock();
    if (at >= end) touch(p, n, write);
    return at >= end ? KE_PLACE_DEVICE : KE_PLACE_BAD;
}

struct move {
    CUdeviceptr dst, src;
    size_t bytes;
    bool over_bus; /* between host and device, which takes time */
};

static void move(const struct move *m) {
    struct ke_pace pace = {0};
    if (m->over_bus) ke_pace(&pace, 0);
    for (size_t done = 0; done < m->bytes;) {
        size_t n = m->bytes - done < CHUNK ? m->bytes - done : CHUNK;
        memmove((void *)(uintptr_t)(m->dst + done), (const void *)(uintptr_t)(m->src + done), n);
        done += n;
        if (m->over_bus) ke_pace(&pace, n);
    }
}

CUresult ke_move(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
    enum ke_place to = ke_place(dst, bytes, true), from = ke_place(src, bytes, false);
    if (to == KE_PLACE_BAD || from == KE_PLACE_BAD)
        return CUDA_ERROR_ILLEGAL_ADDRESS; /* freed after the copy was submitted */
    move(&(struct move){dst, src, bytes, to != from});
    return CUDA_SUCCESS;
}

static CUresult run_move(CUcontext ctx, void *arg) {
    (void)ctx;
    struct move *m = arg;
    return ke_move(m->dst, m->src, m->bytes);
}

/* The ends of a copy that must be device memory (pinned host memory counts: a device can address it). */
enum ends { ANY, TO_DEVICE, FROM_DEVICE, WITHIN };

static bool device_like(CUdeviceptr p, size_t n, enum ke_place place) {
    if (place == KE_PLACE_DEVICE) return true;
    ke_mu_lock();
    bool pinned = ke_host_pinned((void *)(uintptr_t)p, n);
    ke_mu_unlock();
    return pinned;
}

static CUresult plan(CUdeviceptr dst, CUdeviceptr src, size_t n, enum ends ends, struct move *out) {
    enum ke_place to = ke_place(dst, n, true), from = ke_place(src, n, false);
    if (to == KE_PLACE_BAD || from == KE_PLACE_BAD || !dst || !src) return CUDA_ERROR_INVALID_VALUE;
    if ((ends == TO_DEVICE || ends == WITHIN) && !device_like(dst, n, to)) return CUDA_ERROR_INVALID_VALUE;
    if ((ends == FROM_DEVICE || ends == WITHIN) && !device_like(src, n, from))
        return CUDA_ERROR_INVALID_VALUE;
    *out = (struct move){dst, src, n, to != from};
    return CUDA_SUCCESS;
}

static CUresult copy(CUdeviceptr dst, CUdeviceptr src, size_t n, enum ends ends) {
    CUcontext ctx;
    struct move m;
    CUresult rc = ke_current(&ctx);
    if (rc != CUDA_SUCCESS || n == 0) return rc;
    rc = plan(dst, src, n, ends, &m);
    if (rc == CUDA_SUCCESS) rc = ke_capture_touch_stream(ctx->null_stream);
    if (rc == CUDA_SUCCESS) rc = ke_wait_default(ctx);
    if (rc == CUDA_SUCCESS) move(&m);
    return rc;
}

static bool stays(CUdeviceptr p, size_t n) { /* true: a worker may read or write the memory later */
    return ke_place(p, n, false) == KE_PLACE_DEVICE || device_like(p, n, KE_PLACE_HOST);
}

/* Queues a copy; one from or to pageable host memory is done on return, unless it is captured, as documented for the
 * real driver. */
static CUresult copy_async(CUdeviceptr dst, CUdeviceptr src, size_t n, enum ends ends, CUstream handle) {
    CUstream s;
    struct move m;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc != CUDA_SUCCESS || n == 0) return rc;
    rc = plan(dst, src, n, ends, &m);
    if (rc == CUDA_SUCCESS && (ends == TO_DEVICE || ends == FROM_DEVICE)) rc = ke_stream_copies(s, ends == TO_DEVICE);
    if (rc != CUDA_SUCCESS) return rc;
    bool later = ke_capturing(s) || (stays(dst, n) && stays(src, n));
    rc = ke_submit(s, run_move, &m, sizeof m, KE_JOB_NODE(CU_GRAPH_NODE_TYPE_MEMCPY));
    if (rc == CUDA_SUCCESS && !later) rc = ke_wait_stream(s);
    return rc;
}

#define HOST(p) ((CUdeviceptr)(uintptr_t)(p))

KE_FORWARD(cuMemcpy, (CUdeviceptr dst, CUdeviceptr src, size_t n), copy(dst, src, n, ANY))
KE_FORWARD(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s), copy_async(dst, src, n, ANY, s))
KE_FORWARD(cuMemcpyHtoD_v2, (CUdeviceptr dst, const void *src, size_t n), copy(dst, HOST(src), n, TO_DEVICE))
KE_FORWARD(cuMemcpyHtoDAsync_v2, (CUdeviceptr dst, const void *src, size_t n, CUstream s),
           copy_async(dst, HOST(src), n, TO_DEVICE, s))
KE_FORWARD(cuMemcpyDtoH_v2, (void *dst, CUdeviceptr src, size_t n), copy(HOST(dst), src, n, FROM_DEVICE))
KE_FORWARD(cuMemcpyDtoHAsync_v2, (void *dst, CUdeviceptr src, size_t n, CUstream s),
           copy_async(HOST(dst), src, n, FROM_DEVICE, s))
KE_FORWARD(cuMemcpyDtoD_v2, (CUdeviceptr dst, CUdeviceptr src, size_t n), copy(dst, src, n, WITHIN))
KE_FORWARD(cuMemcpyDtoDAsync_v2, (CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s),
           copy_async(dst, src, n, WITHIN, s))
KE_API CUresult cuMemcpyPeer(CUdeviceptr dst, CUcontext dctx, CUdeviceptr src, CUcontext sctx, size_t n) {
    (void)dctx, (void)sctx;
    KE_CALL(copy(dst, src, n, WITHIN));
}
KE_API CUresult cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dctx, CUdeviceptr src, CUcontext sctx,
                                  size_t n, CUstream s) {
    (void)dctx, (void)sctx;
    KE_CALL(copy_async(dst, src, n, WITHIN, s));
}

/* ---- fills -------------------------------------------------------------------------------------- */

struct fill {
    CUdeviceptr dst;
    size_t pitch, width, height; /* in elements, the pitch in bytes */
    unsigned value, each;        /* bytes per element: 1, 2, 4 */
};

static bool fillable(CUdeviceptr at, size_t n) { return device_like(at, n, ke_place(at, n, true)); }

static CUresult run_fill(CUcontext ctx, void *arg) {
    (void)ctx;
    struct fill *f = arg;
    for (size_t row = 0; row < f->height; row++) {
        CUdeviceptr at = f->dst + row * f->pitch;
        if (!fillable(at, f->width * f->each)) return CUDA_ERROR_ILLEGAL_ADDRESS;
        void *p = (void *)(uintptr_t)at;
        if (f->each == 1) memset(p, (int)f->value, f->width);
        for (size_t i = 0; f->each == 2 && i < f->width; i++) ((uint16_t *)p)[i] = (uint16_t)f->value;
        for (size_t i = 0; f->each == 4 && i < f->width; i++) ((uint32_t *)p)[i] = f->value;
    }
    return CUDA_SUCCESS;
}

#define FILL_JOB (KE_JOB_KERNEL | KE_JOB_NODE(CU_GRAPH_NODE_TYPE_MEMSET))

static CUresult check_fill(const struct fill *f) {
    if (f->dst % f->each) return CUDA_ERROR_INVALID_VALUE;
    size_t span = (f->height - 1) * f->pitch + f->width * f->each;
    return fillable(f->dst, span) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult ke_fill_work(CUdeviceptr dst, size_t pitch, unsigned value, unsigned each, size_t width, size_t height,
                      struct ke_work *out) {
    struct fill f = {dst, pitch, width, height, value, each};
    if ((each != 1 && each != 2 && each != 4) || !width || !height) return CUDA_ERROR_INVALID_VALUE;
    *out = ke_work(run_fill, &f, sizeof f, FILL_JOB);
    return check_fill(&f);
}

static CUresult fill(struct fill f, CUstream handle, bool wait) {
    CUstream s;
    CUresult rc = ke_stream_resolve(handle, &s);
    if (rc != CUDA_SUCCESS || f.width == 0 || f.height == 0) return rc;
    rc = check_fill(&f);
    if (rc == CUDA_SUCCESS && wait) rc = ke_capture_touch_stream(s);
    if (rc == CUDA_SUCCESS) rc = ke_submit(s, run_fill, &f, sizeof f, FILL_JOB);
    return rc == CUDA_SUCCESS && wait ? ke_wait_stream(s) : rc;
}

#define FILL(name, type, each)                                                                     \
    KE_API CUresult cuMemset##name##_v2(CUdeviceptr dst, type v, size_t n) {                       \
        KE_CALL(fill((struct fill){dst, 0, n, 1, v, each}, NULL, true));                           \
    }                                                                                              \
    KE_API CUresult cuMemset##name##Async(CUdeviceptr dst, type v, size_t n, CUstream s) {         \
        KE_CALL(fill((struct fill){dst, 0, n, 1, v, each}, s, false));                             \
    }
FILL(D8, unsigned char, 1)
FILL(D16, unsigned short, 2)
FILL(D32, unsigned int, 4)

#define FILL_2D(name, type, each)                                                                  \
    KE_API CUresult cuMemset##name##_v2(CUdeviceptr dst, size_t pitch, type v, size_t w, size_t h) { \
        KE_CALL(fill((struct fill){dst, pitch, w, h, v, each}, NULL, true));                       \
    }                                                                                              \
    KE_API CUresult cuMemset##name##Async(CUdeviceptr dst, size_t pitch, type v, size_t w, size_t h, \
                                          CUstream s) {                                            \
        KE_CALL(fill((struct fill){dst, pitch, w, h, v, each}, s, false));                         \
    }
FILL_2D(D2D8, unsigned char, 1)
FILL_2D(D2D16, unsigned short, 2)
FILL_2D(D2D32, unsigned int, 4)
