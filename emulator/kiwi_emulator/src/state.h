/* The one file that every process on an emulated machine shares: GPUs, the memory each process holds, faults.
 *
 * emulator/kiwi_emulator/_layout.py mirrors the layout (tests compare the two); all fields have a fixed width and
 * natural alignment. Only a process's own slot records what it holds: sums are computed on reading, so a process
 * that is killed during an update leaves nothing to repair.
 */
#ifndef KIWI_STATE_H
#define KIWI_STATE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define KE_MAGIC "KIWIEMU1"
#define KE_LAYOUT 4u
#define KE_GPUS_MAX 16   /* as many as one machine commonly holds */
#define KE_PROCS_MAX 256 /* processes with CUDA initialised at the same time, per emulated machine */
#define KE_FAULTS_MAX 64
#define KE_NAME_MAX 96
#define KE_DRIVER_MAX 32
#define KE_MUTEX_BYTES 64 /* room for a pthread_mutex_t on every architecture */

/* From this driver version on, a process shows CHECKPOINTING / RESTORING while an operation is under way. */
#define KE_DRIVER_WITH_TRANSIENT_STATES 13040u

enum ke_fault_kind {
    KE_FAULT_NONE = 0,
    KE_FAULT_LOCK_TIMEOUT = 1,
    KE_FAULT_CHECKPOINT_FAIL = 2,
    KE_FAULT_RESTORE_FAIL = 3,
    KE_FAULT_RESTORE_OOM = 4,
    KE_FAULT_HANG = 5,
    KE_FAULT_CHECKPOINT_POISON = 6,
    KE_FAULT_CHECKPOINT_KILL = 7,
    KE_FAULT_CHECKPOINT_OOM = 8,
    KE_FAULT_CHECKPOINT_UNSUPPORTED = 9,
    KE_FAULT_RESTORE_INVALID = 10,
    KE_FAULT_LOCK_KILL = 11,
};

/* How real drivers treat programs. The profile of a machine chooses its quirks (_quirks.py says what each
 * means; README.md names the sources). */
enum ke_quirk {
    KE_SYNC_CRASHES = 1u << 0,
    KE_QUERY_CRASHES = 1u << 1,
    KE_STATE_WAITS = 1u << 2,
    KE_MISSING_IS_OS_ERROR = 1u << 3,
    KE_FAILED_RESTORE_KEEPS = 1u << 4,
    KE_HIDDEN_OVERHEAD = 1u << 5,
    KE_UNMAP_DOES_NOT_WAIT = 1u << 6,
    KE_STREAMS_COST = 1u << 7,
    KE_NCCL_KILLS = 1u << 8,
    KE_SERIALISED_CALLER = 1u << 9,
    KE_KILL_TAKES_HOST_DOWN = 1u << 10,
    KE_NO_PROCESS_ROWS = 1u << 11,
    KE_MIG = 1u << 12,
    KE_BROKEN_STAYS = 1u << 13,
    KE_MEMORY_INFO_FAILS = 1u << 14,
    KE_QUESTIONS_PASS = 1u << 15,
    KE_CHECKPOINT_NEEDS_ROOM = 1u << 16,
    KE_NO_PROCESS_SIZES = 1u << 17,
    KE_NVML_WAITS = 1u << 18,
};

/* The part of a context that NVML counts for no process: an H200 freed 6 MiB more than the row said, and took as much
 * again; RTX 4090s freed 5 MiB more. */
#define KE_HIDDEN_BYTES (6ull << 20)

/* With less than this free, a checkpoint is refused: one block of an H200's memory, but at most this share of the GPU,
 * since programs on small emulated GPUs leave less. */
#define KE_CHECKPOINT_BYTES (2ull << 20)
#define KE_CHECKPOINT_SHARE 64

enum ke_op { /* operations that can be made to hang, and requests on the control socket */
    KE_OP_ANY = 0,
    KE_OP_LOCK = 1,
    KE_OP_CHECKPOINT = 2,
    KE_OP_RESTORE = 3,
    KE_OP_UNLOCK = 4,
    KE_OP_GET_STATE = 5,
    KE_OP_RESTORE_TID = 6,
    KE_OP_NVML_MEMORY = 7, /* NVML readings are about a GPU, not a process; KE_OP_ANY leaves them out */
    KE_OP_NVML_PROCESSES = 8,
};

enum ke_process_state {
    KE_RUNNING = 0,
    KE_LOCKED = 1,
    KE_CHECKPOINTED = 2,
    KE_FAILED = 3,
    KE_CHECKPOINTING = 4,
    KE_RESTORING = 5,
};

struct ke_gpu {
    uint8_t uuid[16];
    char name[KE_NAME_MAX];
    uint64_t total_bytes;
    uint64_t lost; /* it has fallen off the bus: NVML answers GPU_IS_LOST to each question about it */
};

struct ke_proc {
    int32_t pid; /* 0: the slot is free */
    uint32_t state;
    uint64_t pid_ns;      /* inode of its PID namespace, in which it has that pid */
    uint64_t start_ticks; /* field 22 of /proc/pid/stat: tells a reused pid apart */
    uint64_t image;       /* hash of /proc/pid/auxv: changes when exec starts another program; 0: unknown */
    uint64_t since_ns;    /* CLOCK_MONOTONIC when CUDA was initialised */
    uint32_t checkpoints, restores;
    uint64_t device_bytes[KE_GPUS_MAX];
    uint64_t context_bytes[KE_GPUS_MAX];
    uint64_t busy_ns[KE_GPUS_MAX];       /* time of kernels in finished busy periods */
    uint64_t busy_since_ns[KE_GPUS_MAX]; /* start of the current busy period, 0: idle */
    uint64_t parked_bytes[KE_GPUS_MAX];  /* device bytes while checkpointed */
    uint64_t kept_bytes[KE_GPUS_MAX];    /* taken by a failed restore, or left to forked children; NVML names no owner */
};

struct ke_fault {
    uint32_t kind; /* written last when set, zeroed when cleared */
    int32_t pid;   /* the target, 0: any */
    int32_t count; /* number of operations that the fault still hits, -1: until cleared */
    uint32_t op;   /* KE_FAULT_HANG only */
    uint64_t duration_ns;
    uint32_t hits;
    uint32_t in_progress; /* operations hanging in this slot now */
};

struct ke_state {
    char magic[8];
    uint32_t layout, gpu_count;
    uint32_t driver_version;
    uint32_t mutex_ready;
    uint64_t context_bytes;    /* cost of a context */
    uint64_t copy_bytes_per_s; /* 0: as fast as memory */
    uint64_t write_seq;        /* odd while a slot is being changed */
    uint32_t quirks;          /* enum ke_quirk */
    int32_t host_down;         /* the pid whose kill took the host down; 0: the host is up */
    uint64_t stream_bytes;     /* cost of a stream, with KE_STREAMS_COST */
    char driver_name[KE_DRIVER_MAX]; /* as NVML gives it */
    union {
        pthread_mutex_t mutex;
        char room[KE_MUTEX_BYTES];
    } lock;
    struct ke_gpu gpus[KE_GPUS_MAX];
    struct ke_fault faults[KE_FAULTS_MAX];
    struct ke_proc procs[KE_PROCS_MAX];
};

/* Maps the file named by KIWI_EMULATOR_STATE, once per process.  NULL: *why says what is wrong. */
struct ke_state *ke_state_get(const char **why);
const char *ke_state_path(void);

/* Returns an O_PATH descriptor of the directory of control sockets, or -1. */
int ke_open_control(void);
enum { KE_CONTROL_NAME = 40 };
/* The name of a process's control socket: containers may have the same pids. */
void ke_control_name(char name[KE_CONTROL_NAME], uint64_t pid_ns, int pid);
/* Connects to the socket of that name; `flags` are those of socket(). -1: errno says why. */
int ke_control_connect(uint64_t pid_ns, int pid, int flags);
uint64_t ke_own_pid_ns(void);

/* The shared lock. If its owner dies, only write_seq can be left half done, and it is repaired. */
void ke_state_lock(struct ke_state *s);
void ke_state_unlock(struct ke_state *s);

struct ke_proc *ke_proc_register(struct ke_state *s);   /* NULL: the table is full */
void ke_proc_unregister(struct ke_state *s, struct ke_proc *p);
/* Returns false once this process has left the books at its exit, although its threads still run: the slot may
 * already belong to another process. Lock held. */
int ke_proc_ours(const struct ke_proc *p);
void ke_reap(struct ke_state *s);                       /* lock held: frees the slots of the dead */
struct ke_proc *ke_proc_find(struct ke_state *s, int pid); /* lock held; live ones only, by the pid here */
/* Returns the pid by which this process knows the slot's; 0: it is not visible here, -1: it has ended. Lock held. */
int ke_pid_here(const struct ke_state *s, const struct ke_proc *p);
uint64_t ke_gpu_used(const struct ke_state *s, unsigned gpu); /* lock held */

/* Takes (or with a negative delta gives back) bytes of a GPU. Returns 0, or -1 if they do not fit. */
int ke_charge(struct ke_state *s, struct ke_proc *p, unsigned gpu, int64_t device_delta,
              int64_t context_delta);

/* Uses up one count of a matching fault and returns its slot; NULL: none is set. */
struct ke_fault *ke_fault_take(struct ke_state *s, enum ke_fault_kind kind, int pid, enum ke_op op);
/* Blocks for as long as a HANG for this operation lasts, or until it is cleared. */
void ke_fault_hang(struct ke_state *s, int pid, enum ke_op op);

uint64_t ke_now_ns(void);
void ke_sleep_ns(uint64_t ns);
int ke_process_start(int pid, uint64_t *start_ticks); /* -1: no such live process */
/* Returns whether a caller of the checkpoint API holds this process: it is locked or out. */
int ke_process_held(struct ke_state *s);
int ke_process_leader(int tid);                       /* returns the process of a thread id; -1: none */

#endif
