/* Shared declarations of the emulated driver's parts, inside one process.
 *
 * One mutex, ke.mu, guards everything here; long work (copies, kernels) runs outside it.
 * Every public call passes the gate (ke_enter/ke_leave), which the checkpoint API closes.
 */
#ifndef KIWI_EMU_H
#define KIWI_EMU_H

#include <pthread.h>
#include <stdbool.h>

#include <string.h>

#include "cu.h"
#include "state.h"

/* Device addresses: a range where neither Linux nor malloc maps anything by itself, so that a device pointer
 * is never mistaken for a host pointer. */
#ifndef KE_DEVICE_BASE /* the thread sanitizer needs another range */
#define KE_DEVICE_BASE 0x200000000000ull
#define KE_DEVICE_SPAN 0x100000000000ull
#endif
#define KE_PAGE 4096ull
#define KE_BIG_PAGE (2ull << 20) /* alignment of large allocations; granularity of the VMM calls */

#define KE_CTX_STACK_MAX 64
#define KE_MULTIPROCESSORS 2
#define KE_LIMITS 10 /* CU_LIMIT_CIG_SHMEM_FALLBACK_ENABLED is the last */

struct ke_phys { /* a piece of a GPU's memory, wherever it is mapped */
    struct ke_phys *next, *prev;
    unsigned dev;
    uint64_t size, offset; /* in the device's memfd, unless there is a `file`; offsets are never reused */
    int file;              /* of its own, for memory that other processes may map, and host memory; -1: none */
    bool shared, imported; /* was exported; belongs to another process's books */
    bool host;             /* in no GPU */
    void *at;              /* the one address of an allocation, which is not in the memfd; NULL: VMM memory */
    unsigned refs;         /* handles + mappings */
    unsigned handles;      /* handles from cuMemCreate / cuMemRetainAllocationHandle */
    void *backup;          /* host copy while checkpointed */
    CUmemAllocationProp prop;
};

struct ke_range { /* reserved addresses: an allocation or a VMM reservation */
    CUdeviceptr addr;
    uint64_t size;
    bool vmm;
};

struct ke_map { /* physical memory at an address */
    CUdeviceptr addr;
    uint64_t size, phys_offset;
    struct ke_phys *phys;
    CUcontext ctx; /* owner of an allocation; NULL for VMM */
    CUmemoryPool pool;
    int prot;
    uint64_t id;
    uint64_t asked; /* bytes that the caller asked for */
};

struct ke_dep {
    CUstream stream;
    uint64_t seq;
};

struct ke_nodes { /* a set of nodes of one graph */
    CUgraphNode *at;
    size_t count;
};

struct CUstream_st {
    bool alive, started;
    CUcontext ctx;
    unsigned flags;
    int priority;
    uint64_t id;
    uint64_t cost; /* bytes of GPU memory charged for the stream */
    bool copied_in, copied_out;
    uint64_t submitted, completed; /* never decrease, not even when the struct is reused */
    struct ke_job *head, *tail;
    pthread_cond_t more;
    struct ke_capture *capture; /* the capture that the stream takes part in */
    struct ke_nodes after;      /* the next captured node depends on these */
    CUgraphEdgeData *edges;     /* as many edges without data, for callers that ask */
    struct CUstream_st *next; /* in the list of all streams of the process */
};

struct CUevent_st {
    uint32_t magic;
    bool alive, recorded;
    CUcontext ctx;
    unsigned flags, refs;
    struct ke_dep at;
    uint64_t generation, time_ns;
    uint64_t capture_id; /* the capture of the last record, which may be over; 0: none */
    struct ke_nodes captured;
    struct CUevent_st *next_free;
};

struct CUmemPoolHandle_st {
    uint32_t magic;
    unsigned dev;
    bool is_default;
    uint64_t release_threshold, used, used_high;
    int reuse[3];
};

struct CUctx_st {
    bool alive, primary;
    struct CUctx_st *green_of; /* of a green context: the primary context, which owns its memory */
    unsigned dev, flags, version;
    uint64_t id;
    CUresult error; /* the error of a failed kernel: every later call returns it */
    size_t limits[KE_LIMITS];
    CUstream null_stream;
    struct CUctx_st *next;
};

struct ke_device {
    unsigned gpu; /* the GPU's index in the state file */
    int memfd;
    uint64_t phys_end;
    struct CUctx_st *primary;
    unsigned primary_refs, primary_flags;
    struct CUmemPoolHandle_st default_pool;
    CUmemoryPool current_pool;
    unsigned busy; /* number of kernels that run now */
};

enum ke_hold { /* how the checkpoint API holds this process */
    KE_FREE,
    KE_LOCKING, /* a lock waits for calls and work under way */
    KE_HELD,
    KE_OUT, /* from the start of a checkpoint to the end of a restore */
};

struct ke_process {
    pthread_mutex_t mu;
    pthread_cond_t gate; /* the gate opened */
    pthread_cond_t done; /* a job ended, or the last call left while a caller waits for that */
    bool initialised, forked;
    enum ke_hold hold;
    unsigned inside;  /* calls past the gate */
    uint64_t pending; /* jobs submitted and not ended */
    uint64_t unmaps;  /* count of unmaps that did not wait for jobs */
    uint64_t next_id;
    struct ke_state *state;
    struct ke_proc *slot;
    unsigned device_count;
    struct ke_device devices[KE_GPUS_MAX];
    struct CUctx_st *contexts;
    struct CUstream_st *streams;
    struct ke_phys *phys;
};
extern struct ke_process ke;
extern __thread bool ke_in_callback; /* this thread runs a host function, where CUDA calls are not permitted */

typedef CUresult (*ke_job_fn)(CUcontext ctx, void *arg);
#define KE_WORK_BYTES 96
struct ke_work { /* a job that can be repeated, as in a graph */
    ke_job_fn fn;
    unsigned flags;
    _Alignas(16) char arg[KE_WORK_BYTES];
};
static inline struct ke_work ke_work(ke_job_fn fn, const void *arg, size_t size, unsigned flags) {
    struct ke_work w = {.fn = fn, .flags = flags};
    memcpy(w.arg, arg, size);
    return w;
}

/* ---- core.c: initialisation, the gate ---- */
CUresult ke_enter(void);
CUresult ke_enter_unheld(enum ke_quirk quirk, bool *skip);
bool ke_has(enum ke_quirk quirk);
enum ke_hold ke_held(enum ke_quirk quirk); /* KE_FREE for a driver without this quirk */
void ke_leave(void);

/* The body of a public call: passes the gate, evaluates the expression, leaves. */
#define KE_CALL(expr)                  \
    do {                               \
        CUresult ke_rc_ = ke_enter();  \
        if (ke_rc_) return ke_rc_;     \
        ke_rc_ = (expr);               \
        ke_leave();                    \
        return ke_rc_;                 \
    } while (0)

/* The body of a wait or a query that a driver with this quirk does not hold back: the call returns at once
 * while the process is locked, and crashes while the process is checkpointed. */
#define KE_CALL_UNHELD(quirk, expr)                                  \
    do {                                                              \
        bool ke_skip_ = false;                                        \
        CUresult ke_rc_ = ke_enter_unheld(quirk, &ke_skip_);         \
        if (ke_rc_ || ke_skip_) return ke_rc_;                        \
        ke_rc_ = (expr);                                              \
        ke_leave();                                                   \
        return ke_rc_;                                                \
    } while (0)

/* The body of a query that a driver with this quirk answers at once while the process is held. The
 * expression only reads, because a checkpoint may be under way beside it. */
#define KE_CALL_ANSWERED(quirk, expr)                 \
    do {                                               \
        if (ke_held(quirk) != KE_FREE) return (expr); \
        KE_CALL(expr);                                 \
    } while (0)

/* The body of a call that captures may forbid. */
#define KE_CALL_UNSAFE(expr) KE_CALL((ke_rc_ = ke_capture_unsafe()) ? ke_rc_ : (expr))

/* A public call that only passes the gate and evaluates the expression: several calls share its body. */
#define KE_FORWARD(name, params, expr) \
    KE_API CUresult name params { KE_CALL(expr); }

/* Begins a public call: the body that follows runs past the gate. `args` repeats the names of `params`. */
#define KE_ENTRY(name, params, args)                         \
    static CUresult in_##name params;                        \
    KE_API CUresult name params { KE_CALL(in_##name args); } \
    static CUresult in_##name params

/* The same for a call that captures may forbid. */
#define KE_ENTRY_UNSAFE(name, params, args)                         \
    static CUresult in_##name params;                               \
    KE_API CUresult name params { KE_CALL_UNSAFE(in_##name args); } \
    static CUresult in_##name params

static inline void ke_mu_lock(void) { pthread_mutex_lock(&ke.mu); }
static inline void ke_mu_unlock(void) { pthread_mutex_unlock(&ke.mu); }

/* ---- context.c ---- */
CUresult ke_current(CUcontext *ctx); /* error: no context is current, or it is gone or has failed */
CUcontext ke_current_or_null(void);
CUresult ke_context_check(CUcontext ctx);
CUcontext ke_context_new(unsigned dev, unsigned flags, bool primary); /* ke.mu held; not alive yet */
CUresult ke_primary_retain(CUcontext *out, CUdevice dev);
CUresult ke_primary_release(CUdevice dev, bool reset);

/* ---- memory.c (ke.mu held) ---- */
CUresult ke_phys_new(unsigned dev, uint64_t size, struct ke_phys **out);
struct ke_phys *ke_phys_of_handle(CUmemGenericAllocationHandle h); /* vmm.c; NULL: no such memory */
bool ke_group_release(CUmemGenericAllocationHandle h); /* multicast.c; false: there is no such object */
/* Returns a piece of memory that is on no book of this process: in a file of its own, which it takes. */
struct ke_phys *ke_phys_of_file(unsigned dev, uint64_t size, int file);
void ke_phys_unref(struct ke_phys *p);
int ke_phys_fd(const struct ke_phys *p);      /* the file in which VMM memory is */
uint64_t ke_phys_at(const struct ke_phys *p); /* and where in it */
CUdeviceptr ke_range_reserve(uint64_t size, uint64_t align, CUdeviceptr hint, bool vmm);
struct ke_range *ke_range_at(CUdeviceptr addr); /* returns the range that holds addr */
void ke_range_drop(struct ke_range *r);
struct ke_map *ke_map_at(CUdeviceptr addr); /* returns the mapping that holds addr */
struct ke_map *ke_map_add(struct ke_map m); /* NULL: no host memory */
void ke_map_drop(struct ke_map *m);         /* unmaps the memory and drops the reference */
void ke_map_leave(struct ke_map *m);        /* drops the reference; work under way may still touch the addresses */
void ke_maps_bury(void);                    /* nothing runs: unmaps what ke_map_leave has left */
CUresult ke_map_apply(const struct ke_map *m, int prot);
size_t ke_map_count(void);
struct ke_map *ke_map_index(size_t i);
CUresult ke_alloc(CUcontext ctx, CUmemoryPool pool, uint64_t size, CUdeviceptr *out);
CUresult ke_free(CUdeviceptr addr);
void ke_free_context(CUcontext ctx);

/* ---- host.c ---- */
bool ke_host_pinned(const void *p, size_t n); /* ke.mu held */
bool ke_host_range(const void *p, void **base, size_t *size); /* ke.mu held */

/* ---- copy.c ---- */
enum ke_place { KE_PLACE_BAD, KE_PLACE_HOST, KE_PLACE_DEVICE };
enum ke_place ke_place(CUdeviceptr p, size_t n, bool write);
void ke_touch_nothing(void); /* called when a job begins */
bool ke_touched_all_there(void);
struct ke_pace {
    uint64_t start_ns, bytes;
};
CUresult ke_move(CUdeviceptr dst, CUdeviceptr src, size_t bytes);
CUresult ke_fill_work(CUdeviceptr dst, size_t pitch, unsigned value, unsigned each, size_t width, size_t height,
                      struct ke_work *out); /* width in elements of `each` bytes */
void ke_pace(struct ke_pace *pace, uint64_t bytes); /* waits for as long as a copy at the set speed takes */

/* ---- stream.c ---- */
#define KE_JOB_KERNEL 1u /* the job counts as GPU busy time */
#define KE_JOB_NODE(type) ((unsigned)(type) << 8) /* the job's node type in a graph; a kernel by default */
#define KE_JOB_TYPE(flags) ((flags) >> 8)
struct ke_work ke_host_work(CUhostFn fn, void *data);
CUresult ke_stream_resolve(CUstream handle, CUstream *out); /* accepts 0, 1, 2 and created streams */
CUresult ke_submit(CUstream s, ke_job_fn fn, const void *arg, size_t size, unsigned flags);
CUresult ke_submit_after(CUstream s, struct ke_dep dep);
CUresult ke_wait_stream(CUstream s);
CUresult ke_wait_default(CUcontext ctx); /* waits as a call on the legacy default stream does */
void ke_wait_context(CUcontext ctx);     /* NULL: waits for everything in the process */
CUresult ke_stream_new(CUcontext ctx, unsigned flags, int priority, CUstream *out);
int ke_start_thread(void *(*fn)(void *), void *arg); /* returns an error number */
CUresult ke_stream_copies(CUstream s, bool in); /* charges GPU memory for the first copy in a direction */
void ke_streams_end(CUcontext ctx); /* ke.mu held, all streams idle: gives back what they cost */

/* ---- capture.c ---- */
/* Called before what a capture may forbid: return the error if one does, and invalidate it. They take ke.mu. */
CUresult ke_capture_unsafe(void); /* for a call that no graph records, such as an allocation */
CUresult ke_capture_touch_stream(CUstream s); /* for waiting for s, or asking whether s is done */
CUresult ke_capture_touch_context(CUcontext ctx);
CUresult ke_capture_refuse(CUstream s, CUresult why); /* for work in s that cannot be a node */
bool ke_capturing(CUstream s);
/* ke.mu held. If *captured is set, the caller has nothing to do now. */
CUresult ke_capture_work(CUstream s, const struct ke_work *work, bool *captured);
CUresult ke_capture_record(CUevent e, CUstream s, bool *captured);
CUresult ke_capture_wait(CUstream s, CUevent e, bool *captured);
CUresult ke_capture_touch_event(CUevent e);
void ke_capture_forget_event(CUevent e);
void ke_capture_forget_stream(CUstream s);

/* ---- user_object.c ---- */
void ke_user_objects_bury(void); /* ke.mu not held: runs the destructors that are due */

/* ---- launch.c ---- */
CUresult ke_launch_work(CUfunction f, const unsigned *dims, void **params, void **extra, struct ke_work *out);

/* ---- the control socket ---- */

struct ke_request {
    uint32_t op; /* enum ke_op */
    uint32_t timeout_ms;
    uint32_t pairs;
    CUcheckpointGpuPair pair[KE_GPUS_MAX];
};
struct ke_answer {
    int32_t result, value;
};

/* ---- checkpoint.c: how a target serves a request ---- */
CUresult ke_target_serve(const struct ke_request *r);
int ke_target_state(void); /* waits for an operation under way, unless the driver shows transient states */

/* ---- server.c: the thread that answers ---- */
CUresult ke_server_listen(void);
CUresult ke_server_answer(void);
void ke_server_stop(void);
void ke_server_forget(void); /* called in a forked child */

/* ---- control.c: the caller's side ---- */
void ke_control_forget(void); /* called in a forked child */

#endif
