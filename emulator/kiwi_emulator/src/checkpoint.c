/* The target's side of the checkpoint API: closes and opens the gate, and moves memory out and in. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "emu.h"

#define COPY_CHUNK (4ull << 20)

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER; /* operations on this process */
static bool restore_refused; /* every restore answers INVALID_VALUE, as for an importer of CUDA IPC on 580 */
static bool restore_broken; /* a restore failed: no later restore succeeds (cuda-checkpoint #44) */

static void set_state(enum ke_process_state state) {
    ke_state_lock(ke.state);
    if (ke_proc_ours(ke.slot)) ke.slot->state = state;
    ke_state_unlock(ke.state);
}
static enum ke_process_state state_now(void) {
    return (enum ke_process_state)__atomic_load_n(&ke.slot->state, __ATOMIC_ACQUIRE);
}
static bool fault(enum ke_fault_kind kind) {
    return ke_fault_take(ke.state, kind, getpid(), KE_OP_ANY) != NULL;
}

/* ---- lock, unlock ----------------------------------------------------------------------------------- */

/* Kills the target, as a driver does. Disables the core dump, which would hold all of the GPU's memory. */
static void die(int number) {
    prctl(PR_SET_DUMPABLE, 0);
    signal(number, SIG_DFL);
    kill(getpid(), number);
    for (;;) pause();
}

static struct timespec in_ms(unsigned ms) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint64_t ns = (uint64_t)t.tv_nsec + (uint64_t)ms * 1000000u;
    t.tv_sec += (time_t)(ns / 1000000000u);
    t.tv_nsec = (long)(ns % 1000000000u);
    return t;
}

static void hold(enum ke_hold how) { /* ke.mu held */
    ke.hold = how;
    pthread_cond_broadcast(&ke.gate); /* calls that are not held back return, or crash */
}

static void hold_calls(enum ke_hold how) {
    ke_mu_lock();
    hold(how);
    ke_mu_unlock();
}

/* Locks: new calls wait from now on; waits until calls and work under way end, or the time limit is over. */
static CUresult do_lock(unsigned timeout_ms) {
    if (state_now() != KE_RUNNING) return CUDA_ERROR_ILLEGAL_STATE;
    if (fault(KE_FAULT_LOCK_KILL)) die(SIGSEGV);
    if (fault(KE_FAULT_LOCK_TIMEOUT)) {
        ke_sleep_ns((uint64_t)timeout_ms * 1000000u);
        return CUDA_ERROR_NOT_READY;
    }
    struct timespec until = in_ms(timeout_ms);
    CUresult rc = CUDA_SUCCESS;
    ke_mu_lock();
    ke.hold = KE_LOCKING;
    while (rc == CUDA_SUCCESS && (ke.inside || ke.pending)) {
        if (timeout_ms == 0) pthread_cond_wait(&ke.done, &ke.mu);
        else if (pthread_cond_timedwait(&ke.done, &ke.mu, &until) == ETIMEDOUT) rc = CUDA_ERROR_NOT_READY;
    }
    if (rc == CUDA_SUCCESS) {
        set_state(KE_LOCKED);
        hold(KE_HELD);
    } else {
        hold(KE_FREE);
    }
    ke_mu_unlock();
    return rc;
}

static CUresult do_unlock(void) {
    if (state_now() != KE_LOCKED) return CUDA_ERROR_ILLEGAL_STATE;
    set_state(KE_RUNNING);
    hold_calls(KE_FREE);
    return CUDA_SUCCESS;
}

/* ---- checkpoint, restore ---------------------------------------------------------------------------- */
/* The gate is closed and nothing runs, so the tables do not change during these functions. */

static void drop_backups(void) {
    for (struct ke_phys *p = ke.phys; p; p = p->next) {
        if (p->backup) munmap(p->backup, p->size);
        p->backup = NULL;
    }
}

/* Copies n bytes of the memfd. A hole was never written: it is zero, as the backup is. */
static bool copy_from_file(const struct ke_phys *p, uint64_t from, uint64_t n) {
    int fd = ke_phys_fd(p);
    off_t at = (off_t)(ke_phys_at(p) + from), data = lseek(fd, at, SEEK_DATA);
    bool hole = data < 0 || data >= at + (off_t)n;
    return hole || pread(fd, (char *)p->backup + from, n, at) == (ssize_t)n;
}

/* Copies n bytes of an allocation, unless they are a whole chunk of which no page was ever touched. */
static void copy_touched(const struct ke_phys *p, uint64_t from, uint64_t n, int pagemap) {
    uint64_t words[COPY_CHUNK / KE_PAGE], page = (uint64_t)getpagesize(); /* a word is 0: no page, and none in swap */
    const char *at = (const char *)p->at + from;
    size_t bytes = (size_t)(n / page) * sizeof *words;
    off_t where = (off_t)((uintptr_t)at / page * sizeof *words);
    bool touched = n < COPY_CHUNK || pread(pagemap, words, bytes, where) != (ssize_t)bytes;
    for (size_t i = 0; !touched && i < n / page; i++) touched = words[i] != 0;
    if (touched) memcpy((char *)p->backup + from, at, n);
}

static bool copy_out(struct ke_phys *p, struct ke_pace *pace) {
    if (p->host) return true;
    p->backup = mmap(NULL, p->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p->backup == MAP_FAILED) {
        p->backup = NULL;
        return false;
    }
    madvise(p->backup, p->size, MADV_DONTFORK);
    madvise(p->backup, p->size, MADV_HUGEPAGE); /* its pages cost more than the copy */
    int pagemap = p->at && p->size >= COPY_CHUNK ? open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC) : -1;
    bool ok = true;
    for (uint64_t done = 0; ok && done < p->size;) {
        uint64_t n = p->size - done < COPY_CHUNK ? p->size - done : COPY_CHUNK;
        if (p->at) copy_touched(p, done, n, pagemap);
        else ok = copy_from_file(p, done, n);
        done += n;
        ke_pace(pace, n);
    }
    if (pagemap >= 0) close(pagemap);
    return ok;
}

/* Copies VMM memory in, at its pace. The backup of an allocation becomes its memory: see map_again(). */
static bool copy_in(struct ke_phys *p, struct ke_pace *pace) {
    int fd = ke_phys_fd(p);
    for (uint64_t done = 0; !p->host && done < p->size;) {
        uint64_t n = p->size - done < COPY_CHUNK ? p->size - done : COPY_CHUNK;
        if (!p->at && pwrite(fd, (char *)p->backup + done, n, (off_t)(ke_phys_at(p) + done)) != (ssize_t)n) return false;
        done += n;
        ke_pace(pace, n);
    }
    return true;
}

static uint64_t parked_context[KE_GPUS_MAX]; /* cost of the contexts before the checkpoint */

static void give_memory_back(void) {
    for (struct ke_phys *p = ke.phys; p; p = p->next) {
        if (p->at || p->host) continue; /* its pages went with its mapping, or stay */
        fallocate(ke_phys_fd(p), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)ke_phys_at(p), (off_t)p->size);
    }
}

static void park(void) { /* takes the memory off the GPU's books */
    ke_state_lock(ke.state);
    if (ke_proc_ours(ke.slot)) {
        memcpy(parked_context, ke.slot->context_bytes, sizeof parked_context);
        memcpy(ke.slot->parked_bytes, ke.slot->device_bytes, sizeof ke.slot->parked_bytes);
        memset(ke.slot->context_bytes, 0, sizeof ke.slot->context_bytes);
        memset(ke.slot->device_bytes, 0, sizeof ke.slot->device_bytes);
        ke.slot->checkpoints++;
        ke.slot->state = KE_CHECKPOINTED;
    }
    ke_state_unlock(ke.state);
}

/* Gives back all GPU memory, including the contexts'. */
static void give_back(void) {
    for (size_t i = 0; i < ke_map_count(); i++) ke_map_apply(ke_map_index(i), PROT_NONE);
    give_memory_back();
    park();
}

/* Breaks the contexts although the checkpoint is refused, as driver 595 did with managed memory. */
static void poison(void) {
    ke_mu_lock();
    for (CUcontext c = ke.contexts; c; c = c->next) c->error = CUDA_ERROR_LAUNCH_FAILED;
    ke_mu_unlock();
}

/* Returns whether the process is in an NCCL group, by the names of its threads. */
static bool in_nccl_group(void) {
    DIR *tasks = opendir("/proc/self/task");
    bool found = false;
    for (struct dirent *e; tasks && !found && (e = readdir(tasks));) {
        char path[300], name[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", e->d_name);
        FILE *f = fopen(path, "re");
        if (f && fgets(name, sizeof name, f)) found = strncmp(name, "pt_nccl_", strlen("pt_nccl_")) == 0;
        if (f) fclose(f);
    }
    if (tasks) closedir(tasks);
    return found;
}

/* Returns the error of a broken context; nobody knows what a real checkpoint does then. */
static CUresult broken(void) {
    CUresult rc = CUDA_SUCCESS;
    ke_mu_lock();
    for (CUcontext c = ke.contexts; c && rc == CUDA_SUCCESS; c = c->next) rc = c->alive ? c->error : CUDA_SUCCESS;
    ke_mu_unlock();
    return rc;
}

/* Returns whether a GPU that the process uses has too little free memory for a checkpoint. */
static bool too_full(void) {
    bool full = false;
    ke_state_lock(ke.state);
    ke_reap(ke.state);
    for (unsigned i = 0; i < KE_GPUS_MAX && !full; i++) {
        uint64_t total = ke.state->gpus[i].total_bytes, needs = total / KE_CHECKPOINT_SHARE;
        if (needs > KE_CHECKPOINT_BYTES) needs = KE_CHECKPOINT_BYTES;
        bool uses = ke.slot->device_bytes[i] || ke.slot->context_bytes[i];
        full = uses && ke_gpu_used(ke.state, i) + needs > total;
    }
    ke_state_unlock(ke.state);
    return full;
}

/* Returns whether another process can reach memory of this one, or the other way round. Nobody has reported what a real
 * checkpoint does then. */
static bool shares_memory(void) {
    bool found = false;
    ke_mu_lock();
    for (struct ke_phys *p = ke.phys; p && !found; p = p->next) found = p->shared || p->imported;
    ke_mu_unlock();
    return found;
}

/* After a checkpoint that lacked memory the process works, but the driver never moves it again. */
static bool met_a_full_gpu;

/* Returns the reason why a checkpoint does not even begin. */
static CUresult refusal(void) {
    struct ke_fault *kill = ke_fault_take(ke.state, KE_FAULT_CHECKPOINT_KILL, getpid(), KE_OP_ANY);
    if (kill) {
        ke_sleep_ns(kill->duration_ns);
        die(SIGKILL);
    }
    if (ke_has(KE_NCCL_KILLS) && in_nccl_group()) die(SIGABRT);
    if (fault(KE_FAULT_CHECKPOINT_FAIL)) return CUDA_ERROR_OPERATING_SYSTEM;
    if (ke_has(KE_MIG) || fault(KE_FAULT_CHECKPOINT_OOM)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (ke_has(KE_CHECKPOINT_NEEDS_ROOM) && met_a_full_gpu) return CUDA_ERROR_UNKNOWN;
    if (ke_has(KE_CHECKPOINT_NEEDS_ROOM) && too_full()) {
        met_a_full_gpu = true;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (fault(KE_FAULT_CHECKPOINT_UNSUPPORTED) || shares_memory()) return CUDA_ERROR_NOT_SUPPORTED;
    if (ke_has(KE_BROKEN_STAYS) && broken() != CUDA_SUCCESS) return broken();
    if (!fault(KE_FAULT_CHECKPOINT_POISON)) return CUDA_SUCCESS;
    poison();
    return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult do_checkpoint(void) {
    if (state_now() != KE_LOCKED) return CUDA_ERROR_ILLEGAL_STATE;
    CUresult rc = refusal();
    if (rc != CUDA_SUCCESS) return rc;
    hold_calls(KE_OUT);
    bool tell = ke.state->driver_version >= KE_DRIVER_WITH_TRANSIENT_STATES;
    if (tell) set_state(KE_CHECKPOINTING);
    struct ke_pace pace = {0};
    bool ok = true;
    ke_pace(&pace, 0);
    for (struct ke_phys *p = ke.phys; p && ok; p = p->next) ok = copy_out(p, &pace);
    if (!ok) { /* nothing has been given up yet */
        drop_backups();
        set_state(KE_LOCKED);
        hold_calls(KE_HELD);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    give_back();
    return CUDA_SUCCESS;
}

/* Keeps all free memory until the process ends, as a restore without room does; NVML names no owner. Lock held. */
static void keep_what_is_free(void) {
    for (unsigned i = 0; ke_has(KE_FAILED_RESTORE_KEEPS) && ke_proc_ours(ke.slot) && i < KE_GPUS_MAX; i++) {
        uint64_t used = ke_gpu_used(ke.state, i), total = ke.state->gpus[i].total_bytes;
        bool wanted = ke.slot->parked_bytes[i] || parked_context[i];
        if (wanted && used < total) ke.slot->kept_bytes[i] += total - used;
    }
}

static bool fail_for_room(void) {
    ke_state_lock(ke.state);
    keep_what_is_free();
    ke_state_unlock(ke.state);
    return true;
}

/* Takes the room on all GPUs at once, or on none. */
static bool take_room(void) {
    ke_state_lock(ke.state);
    bool fits = ke_proc_ours(ke.slot);
    ke_reap(ke.state);
    for (unsigned i = 0; i < KE_GPUS_MAX && fits; i++) {
        uint64_t want = ke.slot->parked_bytes[i] + parked_context[i];
        fits = want == 0 || ke_gpu_used(ke.state, i) + want <= ke.state->gpus[i].total_bytes;
    }
    for (unsigned i = 0; i < KE_GPUS_MAX && fits; i++) {
        ke.slot->device_bytes[i] = ke.slot->parked_bytes[i];
        ke.slot->context_bytes[i] = parked_context[i];
        ke.slot->parked_bytes[i] = 0;
    }
    if (!fits) keep_what_is_free();
    ke_state_unlock(ke.state);
    return fits;
}

/* Returns whether the request maps a GPU to another one, which is not emulated. */
static bool maps_elsewhere(const struct ke_request *r) {
    for (unsigned i = 0; i < r->pairs && i < KE_GPUS_MAX; i++) {
        if (memcmp(&r->pair[i].oldUuid, &r->pair[i].newUuid, sizeof(CUuuid)) != 0) return true;
    }
    return false;
}

static CUresult fail_for_ever(CUresult rc, enum ke_process_state state) {
    restore_broken = true;
    set_state(state);
    return rc;
}

static bool map_again(const struct ke_map *m) {
    struct ke_phys *p = m->phys;
    if (!p->at) return ke_map_apply(m, m->prot) == CUDA_SUCCESS;
    if (mremap(p->backup, p->size, p->size, MREMAP_MAYMOVE | MREMAP_FIXED, p->at) != p->at) return false;
    p->backup = NULL;
    return true;
}

static CUresult arrive(void) { /* the bytes are back: restores mappings, books and state */
    bool ok = true;
    for (size_t i = 0; i < ke_map_count() && ok; i++) ok = map_again(ke_map_index(i));
    if (!ok) return fail_for_ever(CUDA_ERROR_OPERATING_SYSTEM, KE_FAILED);
    drop_backups();
    ke_state_lock(ke.state);
    if (ke_proc_ours(ke.slot)) {
        ke.slot->restores++;
        ke.slot->state = KE_LOCKED;
    }
    ke_state_unlock(ke.state);
    hold_calls(KE_HELD);
    return CUDA_SUCCESS;
}

static CUresult do_restore(const struct ke_request *r) {
    if (state_now() != KE_CHECKPOINTED) return CUDA_ERROR_ILLEGAL_STATE;
    if (restore_broken) return CUDA_ERROR_OPERATING_SYSTEM;
    if (maps_elsewhere(r)) return CUDA_ERROR_NOT_SUPPORTED;
    if (fault(KE_FAULT_RESTORE_FAIL)) return fail_for_ever(CUDA_ERROR_OPERATING_SYSTEM, KE_FAILED);
    restore_refused = restore_refused || fault(KE_FAULT_RESTORE_INVALID);
    if (restore_refused) return CUDA_ERROR_INVALID_VALUE;
    if ((fault(KE_FAULT_RESTORE_OOM) && fail_for_room()) || !take_room())
        return fail_for_ever(CUDA_ERROR_OUT_OF_MEMORY, KE_CHECKPOINTED);
    bool tell = ke.state->driver_version >= KE_DRIVER_WITH_TRANSIENT_STATES;
    if (tell) set_state(KE_RESTORING);
    struct ke_pace pace = {0};
    bool ok = true;
    ke_pace(&pace, 0);
    for (struct ke_phys *p = ke.phys; p && ok; p = p->next) ok = copy_in(p, &pace);
    return ok ? arrive() : fail_for_ever(CUDA_ERROR_OPERATING_SYSTEM, KE_FAILED);
}

/* ---- a request ----------------------------------------------------------------------------------------- */

CUresult ke_target_serve(const struct ke_request *r) {
    pthread_mutex_lock(&one_at_a_time);
    ke_fault_hang(ke.state, getpid(), (enum ke_op)r->op);
    CUresult rc;
    if (state_now() == KE_FAILED) rc = CUDA_ERROR_OPERATING_SYSTEM;
    else if (r->op == KE_OP_LOCK) rc = do_lock(r->timeout_ms);
    else if (r->op == KE_OP_CHECKPOINT) rc = do_checkpoint();
    else if (r->op == KE_OP_RESTORE) rc = do_restore(r);
    else if (r->op == KE_OP_UNLOCK) rc = do_unlock();
    else rc = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&one_at_a_time);
    return rc;
}

int ke_target_state(void) {
    bool waits = ke.state->driver_version < KE_DRIVER_WITH_TRANSIENT_STATES;
    if (waits) pthread_mutex_lock(&one_at_a_time);
    int state = (int)state_now();
    if (waits) pthread_mutex_unlock(&one_at_a_time);
    return state;
}
