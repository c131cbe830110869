/* Answers the program's queries about its pointers, and keeps the books that other parts read. */
#include <string.h>

#include "base/daemon.h"
#include "base/kiwi_preload.h"
#include "base/log.h"
#include "base/real.h"
#include "owner/blocks.h"

/* ---- pointers ----------------------------------------------------------------------------------------- */

struct answer {
    CUdeviceptr start;
    size_t asked;
    uint64_t id;
    CUcontext ctx;
};

/* Gets the allocation that p points into; false: the allocation is not ours. */
static bool look_up(CUdeviceptr p, struct answer *a) {
    if (kp_forked) return false;
    pthread_mutex_lock(&kp_table_mu);
    struct kp_block *b = kp_table_at(p);
    bool found = b && b->ctx;
    if (found && b->slots) {
        struct kp_slot *s = kp_slab_slot(b, p, &a->start);
        found = s != NULL;
        if (s) a->asked = s->asked, a->id = s->id;
    } else if (found) {
        found = p - b->addr < b->asked;
        a->start = b->addr, a->asked = b->asked, a->id = b->id;
    }
    if (found) a->ctx = b->ctx->handle;
    pthread_mutex_unlock(&kp_table_mu);
    return found;
}

/* Returns whether p is in a block of ours, even outside of an allocation: the driver's answer about a free part of a
 * block would mislead. */
bool kp_own_has(CUdeviceptr p) {
    if (kp_forked) return false;
    pthread_mutex_lock(&kp_table_mu);
    struct kp_block *b = kp_table_at(p);
    bool ours = b && b->ctx;
    pthread_mutex_unlock(&kp_table_mu);
    return ours;
}

CUresult kp_own_range(CUdeviceptr *base, size_t *size, CUdeviceptr p) {
    struct answer a;
    if (!look_up(p, &a))
        return kp_own_has(p) ? CUDA_ERROR_NOT_FOUND : kp_real.cuMemGetAddressRange_v2(base, size, p);
    if (base) *base = a.start;
    if (size) *size = a.asked;
    return CUDA_SUCCESS;
}

/* Answers what the driver would answer wrongly, because the memory is not from its own cuMemAlloc. */
static bool answered(const struct answer *a, void *data, CUpointer_attribute what) {
    switch ((int)what) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = a->ctx; return true;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)data = a->id; return true;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = a->start; return true;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = a->asked; return true;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned *)data = 0; return true;
    default: return false;
    }
}

CUresult kp_own_pointer_attribute(void *data, CUpointer_attribute what, CUdeviceptr p) {
    struct answer a;
    if (data && look_up(p, &a)) {
        if (answered(&a, data, what)) return CUDA_SUCCESS;
    } else if (data && kp_own_has(p)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return kp_real.cuPointerGetAttribute(data, what, p);
}

CUresult kp_own_pointer_attributes(unsigned n, CUpointer_attribute *what, void **data, CUdeviceptr p) {
    struct answer a;
    CUdeviceptr ask = !look_up(p, &a) && kp_own_has(p) ? 0 : p; /* 0: an unknown pointer, as after a free */
    CUresult rc = kp_real.cuPointerGetAttributes(n, what, data, ask);
    if (rc != CUDA_SUCCESS || !look_up(p, &a)) return rc;
    for (unsigned i = 0; i < n; i++) {
        if (data[i]) answered(&a, data[i], what[i]);
    }
    return rc;
}

static uint64_t ipc_refused;

uint64_t kp_own_ipc_refused(void) { return __atomic_load_n(&ipc_refused, __ATOMIC_RELAXED); }

CUresult kp_own_ipc_handle(CUipcMemHandle *handle, CUdeviceptr p) {
    struct answer a;
    if (!look_up(p, &a)) return kp_real.cuIpcGetMemHandle(handle, p);
    kp_own_seen_foreign(KP_FOREIGN_IPC, 1);
    __atomic_fetch_add(&ipc_refused, 1, __ATOMIC_RELAXED);
    kp_warn("memory that Kiwi manages cannot be shared with another process by cuIpcGetMemHandle; start "
            "this program with KIWI_PRELOAD_OWN=0 if it needs that");
    return CUDA_ERROR_NOT_SUPPORTED;
}

static void let_peer(struct kp_block *b, void *arg) {
    (void)arg; /* runs under the mutex: setting access is quick, and no look-up should see half of it */
    CUdeviceptr at = b->addr;
    for (unsigned i = 0; i < b->chunk_count; at += b->chunks[i++].bytes) {
        if (b->chunks[i].where != KP_OUT) kp_physical_access(at, b->chunks[i].bytes);
    }
}

/* Makes our blocks reachable for a peer. The driver's own allocations become so all at once; ours need a call
 * each. */
CUresult kp_own_peer_enabled(CUcontext peer) {
    CUdevice from, to;
    CUcontext popped;
    CUresult rc = kp_real.cuCtxGetDevice(&from);
    if (kp_forked || rc != CUDA_SUCCESS) return rc;
    rc = kp_real.cuCtxPushCurrent_v2(peer);
    if (rc != CUDA_SUCCESS) return rc;
    rc = kp_real.cuCtxGetDevice(&to);
    kp_real.cuCtxPopCurrent_v2(&popped);
    if (rc != CUDA_SUCCESS || !kp_gpu.usable || to != kp_gpu.device || from < 0 || from >= 64) return rc;
    pthread_mutex_lock(&kp_table_mu);
    kp_gpu.peers |= 1ull << from;
    kp_table_each(let_peer, NULL);
    pthread_mutex_unlock(&kp_table_mu);
    return rc;
}

/* ---- books ---------------------------------------------------------------------------------------------- */

const char *kp_foreign_name(enum kp_foreign kind) {
    static const char *const names[KP_FOREIGN_KINDS] = {
        [KP_FOREIGN_POOL] = "pool",     [KP_FOREIGN_MANAGED] = "managed", [KP_FOREIGN_ARRAY] = "array",
        [KP_FOREIGN_VMM] = "vmm",       [KP_FOREIGN_IPC] = "ipc",         [KP_FOREIGN_GRAPH] = "graph",
        [KP_FOREIGN_GPU] = "gpu",       [KP_FOREIGN_PLAIN] = "plain",
        [KP_FOREIGN_EXTERNAL] = "external", [KP_FOREIGN_LEGACY] = "legacy",
    };
    return (unsigned)kind < KP_FOREIGN_KINDS ? names[kind] : "unknown";
}

void kp_books_add(uint64_t *field, int64_t bytes) {
    if (bytes) __atomic_fetch_add(field, (uint64_t)bytes, __ATOMIC_RELAXED);
}

void kp_own_seen_foreign(enum kp_foreign kind, int64_t bytes_or_count) {
    if ((unsigned)kind >= KP_FOREIGN_KINDS) return;
    kp_books_add(&kp_totals.unowned[kind], bytes_or_count);
    if (bytes_or_count > 0) kp_need_grew((uint64_t)bytes_or_count);
    kp_daemon_books_changed(); /* the daemon must know soon what must not be moved */
}

void kp_own_books(struct kp_books *out) {
    out->owned = __atomic_load_n(&kp_totals.owned, __ATOMIC_RELAXED);
    out->resident = __atomic_load_n(&kp_totals.resident, __ATOMIC_RELAXED);
    out->out = __atomic_load_n(&kp_totals.out, __ATOMIC_RELAXED);
    out->driven = __atomic_load_n(&kp_totals.driven, __ATOMIC_RELAXED);
    out->shared = __atomic_load_n(&kp_totals.shared, __ATOMIC_RELAXED);
    out->small_overhead = __atomic_load_n(&kp_totals.small_overhead, __ATOMIC_RELAXED);
    for (int i = 0; i < KP_FOREIGN_KINDS; i++)
        out->unowned[i] = __atomic_load_n(&kp_totals.unowned[i], __ATOMIC_RELAXED);
}

/* ---- needs ---------------------------------------------------------------------------------------------- */

static uint64_t peak, lacked; /* since they were last taken; atomics */

/* What the program was last told about free memory. A large allocation soon afterwards has its size from there: with
 * the GPU for itself the program would have taken more (JAX and TensorFlow take a share of what is free). */
#define TOLD_NS 10000000000ll
static struct {
    pthread_mutex_t mu;
    uint64_t free_bytes, total_bytes, held_bytes;
    int64_t until_ns;
} told = {.mu = PTHREAD_MUTEX_INITIALIZER};

/* Returns the bytes of live allocations on this GPU; `owned` are those in the GPU, or all. */
static uint64_t allocated(uint64_t owned) {
    static const enum kp_foreign in_bytes[] = {KP_FOREIGN_POOL, KP_FOREIGN_ARRAY, KP_FOREIGN_VMM, KP_FOREIGN_PLAIN};
    uint64_t sum = owned + __atomic_load_n(&kp_totals.driven, __ATOMIC_RELAXED);
    sum += __atomic_load_n(&kp_totals.shared, __ATOMIC_RELAXED);
    for (size_t i = 0; i < sizeof in_bytes / sizeof *in_bytes; i++) {
        int64_t bytes = (int64_t)__atomic_load_n(&kp_totals.unowned[in_bytes[i]], __ATOMIC_RELAXED);
        if (bytes > 0) sum += (uint64_t)bytes;
    }
    return sum;
}

static uint64_t all_allocated(void) { return allocated(__atomic_load_n(&kp_totals.owned, __ATOMIC_RELAXED)); }

static void raise_to(uint64_t *most, uint64_t bytes) {
    uint64_t seen = __atomic_load_n(most, __ATOMIC_RELAXED);
    while (seen < bytes &&
           !__atomic_compare_exchange_n(most, &seen, bytes, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}

static uint64_t alone_it_would_take(uint64_t bytes) { /* 0: its size has nothing to do with what was free */
    uint64_t all = 0;
    if (pthread_mutex_trylock(&told.mu)) return 0; /* another thread's is as good; a child made by _Fork must not wait */
    bool much = bytes >= told.free_bytes / 2 && bytes >= told.total_bytes / 16;
    if (much && bytes <= told.free_bytes && kp_now_ns() < told.until_ns) {
        double share = (double)bytes / (double)told.free_bytes;
        all = told.held_bytes + (uint64_t)(share * (double)(told.total_bytes - told.held_bytes));
        __atomic_store_n(&told.until_ns, 0, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&told.mu);
    return all;
}

void kp_need_told(uint64_t free_bytes, uint64_t total_bytes) {
    CUdevice device;
    uint64_t held = all_allocated();
    if (kp_real.cuCtxGetDevice(&device) != CUDA_SUCCESS || held > total_bytes) return;
    if (__atomic_load_n(&kp_gpu.known, __ATOMIC_ACQUIRE) && device != kp_gpu.device) return;
    if (pthread_mutex_trylock(&told.mu)) return;
    told.free_bytes = free_bytes, told.total_bytes = total_bytes, told.held_bytes = held;
    __atomic_store_n(&told.until_ns, kp_now_ns() + TOLD_NS, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&told.mu);
}

void kp_need_grew(uint64_t bytes) {
    raise_to(&peak, all_allocated());
    if (__atomic_load_n(&told.until_ns, __ATOMIC_RELAXED)) raise_to(&lacked, alone_it_would_take(bytes));
}

void kp_need_lacked(uint64_t bytes) {
    if (kp_gpu.total_bytes && bytes > kp_gpu.total_bytes) return; /* no GPU could have given that */
    raise_to(&lacked, all_allocated() + bytes);
    kp_daemon_books_changed();
}

void kp_need_take(struct kp_need *need) {
    need->held = allocated(__atomic_load_n(&kp_totals.resident, __ATOMIC_RELAXED));
    need->peak = __atomic_exchange_n(&peak, all_allocated(), __ATOMIC_RELAXED);
    need->lacked = __atomic_exchange_n(&lacked, 0, __ATOMIC_RELAXED);
    if (need->peak < need->held) need->peak = need->held;
}
