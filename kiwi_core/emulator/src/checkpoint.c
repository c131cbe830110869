/* The target's side of the checkpoint API: a thread answers requests on the control socket
 * <state>.d/<pid>, closes and opens the gate, moves memory out and in. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "emu.h"

#define THREAD_STACK (256u << 10)
#define BACKLOG 64
#define COPY_CHUNK (4ull << 20)

static int listener = -1, directory = -1;
static pid_t server_tid;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER; /* operations on this process */
static bool restore_broken; /* a restore failed: it can never be repeated (cuda-checkpoint #44) */

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

static struct timespec in_ms(unsigned ms) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint64_t ns = (uint64_t)t.tv_nsec + (uint64_t)ms * 1000000u;
    t.tv_sec += (time_t)(ns / 1000000000u);
    t.tv_nsec = (long)(ns % 1000000000u);
    return t;
}

static void open_gate(void) { /* ke.mu held */
    ke.locked = false;
    pthread_cond_broadcast(&ke.gate);
}

/* New calls wait from now on; calls and work under way come to their end, or the time is up. */
static CUresult do_lock(unsigned timeout_ms) {
    if (state_now() != KE_RUNNING) return CUDA_ERROR_ILLEGAL_STATE;
    if (fault(KE_FAULT_LOCK_TIMEOUT)) {
        ke_sleep_ns((uint64_t)timeout_ms * 1000000u);
        return CUDA_ERROR_NOT_READY;
    }
    struct timespec until = in_ms(timeout_ms);
    CUresult rc = CUDA_SUCCESS;
    ke_mu_lock();
    ke.locked = true;
    while (rc == CUDA_SUCCESS && (ke.inside || ke.pending)) {
        if (timeout_ms == 0) pthread_cond_wait(&ke.done, &ke.mu);
        else if (pthread_cond_timedwait(&ke.done, &ke.mu, &until) == ETIMEDOUT) rc = CUDA_ERROR_NOT_READY;
    }
    if (rc == CUDA_SUCCESS) set_state(KE_LOCKED);
    else open_gate();
    ke_mu_unlock();
    return rc;
}

static CUresult do_unlock(void) {
    if (state_now() != KE_LOCKED) return CUDA_ERROR_ILLEGAL_STATE;
    set_state(KE_RUNNING);
    ke_mu_lock();
    open_gate();
    ke_mu_unlock();
    return CUDA_SUCCESS;
}

/* ---- checkpoint, restore ---------------------------------------------------------------------------- */
/* The gate is closed and nothing runs, so the tables do not change under these. */

static void drop_backups(void) {
    for (struct ke_phys *p = ke.phys; p; p = p->next) {
        if (p->backup) munmap(p->backup, p->size);
        p->backup = NULL;
    }
}

static bool copy_out(struct ke_phys *p, struct ke_pace *pace) {
    int fd = ke.devices[p->dev].memfd;
    p->backup = mmap(NULL, p->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p->backup == MAP_FAILED) {
        p->backup = NULL;
        return false;
    }
    madvise(p->backup, p->size, MADV_DONTFORK);
    for (uint64_t done = 0; done < p->size;) {
        uint64_t n = p->size - done < COPY_CHUNK ? p->size - done : COPY_CHUNK;
        off_t at = (off_t)(p->offset + done), data = lseek(fd, at, SEEK_DATA);
        bool hole = data < 0 || data >= at + (off_t)n; /* never written: zero here and there */
        if (!hole && pread(fd, (char *)p->backup + done, n, at) != (ssize_t)n) return false;
        done += n;
        ke_pace(pace, n);
    }
    return true;
}

static bool copy_in(struct ke_phys *p, struct ke_pace *pace) {
    int fd = ke.devices[p->dev].memfd;
    for (uint64_t done = 0; done < p->size;) {
        uint64_t n = p->size - done < COPY_CHUNK ? p->size - done : COPY_CHUNK;
        if (pwrite(fd, (char *)p->backup + done, n, (off_t)(p->offset + done)) != (ssize_t)n) return false;
        done += n;
        ke_pace(pace, n);
    }
    return true;
}

static uint64_t parked_context[KE_GPUS_MAX]; /* what the contexts cost before */

/* Gives the GPU back: everything, the contexts too. */
static void give_back(void) {
    for (size_t i = 0; i < ke_map_count(); i++) ke_map_apply(ke_map_index(i), PROT_NONE);
    for (struct ke_phys *p = ke.phys; p; p = p->next) {
        fallocate(ke.devices[p->dev].memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)p->offset,
                  (off_t)p->size);
    }
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

static CUresult do_checkpoint(void) {
    if (state_now() != KE_LOCKED) return CUDA_ERROR_ILLEGAL_STATE;
    if (fault(KE_FAULT_CHECKPOINT_FAIL)) return CUDA_ERROR_OPERATING_SYSTEM;
    bool tell = ke.state->driver_version >= KE_DRIVER_WITH_TRANSIENT_STATES;
    if (tell) set_state(KE_CHECKPOINTING);
    struct ke_pace pace = {0};
    bool ok = true;
    ke_pace(&pace, 0);
    for (struct ke_phys *p = ke.phys; p && ok; p = p->next) ok = copy_out(p, &pace);
    if (!ok) { /* nothing has been given up yet */
        drop_backups();
        set_state(KE_LOCKED);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    give_back();
    return CUDA_SUCCESS;
}

/* All GPUs' room at once, or none. */
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
    ke_state_unlock(ke.state);
    return fits;
}

/* Only the identity is accepted: moving to another GPU is not emulated. */
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

static CUresult do_restore(const struct ke_request *r) {
    if (state_now() != KE_CHECKPOINTED) return CUDA_ERROR_ILLEGAL_STATE;
    if (restore_broken) return CUDA_ERROR_OPERATING_SYSTEM;
    if (maps_elsewhere(r)) return CUDA_ERROR_NOT_SUPPORTED;
    if (fault(KE_FAULT_RESTORE_FAIL)) return fail_for_ever(CUDA_ERROR_OPERATING_SYSTEM, KE_FAILED);
    if (fault(KE_FAULT_RESTORE_OOM) || !take_room())
        return fail_for_ever(CUDA_ERROR_OUT_OF_MEMORY, KE_CHECKPOINTED);
    if (ke.state->driver_version >= KE_DRIVER_WITH_TRANSIENT_STATES) set_state(KE_RESTORING);
    struct ke_pace pace = {0};
    bool ok = true;
    ke_pace(&pace, 0);
    for (struct ke_phys *p = ke.phys; p && ok; p = p->next) ok = copy_in(p, &pace);
    for (size_t i = 0; i < ke_map_count() && ok; i++)
        ok = ke_map_apply(ke_map_index(i), ke_map_index(i)->prot) == CUDA_SUCCESS;
    if (!ok) return fail_for_ever(CUDA_ERROR_OPERATING_SYSTEM, KE_FAILED);
    drop_backups();
    ke_state_lock(ke.state);
    if (ke_proc_ours(ke.slot)) {
        ke.slot->restores++;
        ke.slot->state = KE_LOCKED;
    }
    ke_state_unlock(ke.state);
    return CUDA_SUCCESS;
}

/* ---- the server --------------------------------------------------------------------------------------- */

static CUresult serve(const struct ke_request *r) {
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

/* Connections being answered: a forked child must close its copies, or a caller would wait for a
 * killed target for as long as the child lives. */
static int answering[BACKLOG];

static void note(int old, int new) {
    for (int i = 0; i < BACKLOG; i++) {
        int expected = old;
        if (__atomic_compare_exchange_n(&answering[i], &expected, new, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            return;
    }
}

static bool may_ask(int fd) {
    struct ucred peer;
    socklen_t n = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) != 0) return false;
    return peer.uid == 0 || peer.uid == geteuid();
}

static void *answer_one(void *arg) {
    int fd = (int)(intptr_t)arg;
    struct ke_request r;
    struct ke_answer a = {CUDA_ERROR_NOT_PERMITTED, 0};
    if (recv(fd, &r, sizeof r, 0) == (ssize_t)sizeof r) {
        if (may_ask(fd) && r.op == KE_OP_RESTORE_TID) a = (struct ke_answer){CUDA_SUCCESS, server_tid};
        else if (may_ask(fd)) a.result = (int32_t)serve(&r);
        send(fd, &a, sizeof a, MSG_NOSIGNAL); /* the caller may be gone; what was done stays done */
    }
    note(fd, 0);
    close(fd);
    return NULL;
}

static int start_thread(void *(*fn)(void *), void *arg) {
    pthread_attr_t a;
    pthread_t thread;
    sigset_t all, old;
    pthread_attr_init(&a);
    pthread_attr_setstacksize(&a, THREAD_STACK);
    pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&thread, &a, fn, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&a);
    return rc;
}

static void *accept_all(void *arg) {
    int fd = (int)(intptr_t)arg;
    __atomic_store_n(&server_tid, (pid_t)syscall(SYS_gettid), __ATOMIC_RELEASE);
    for (;;) {
        int c = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
        if (c < 0 && (errno == EBADF || errno == EINVAL)) return NULL;
        if (c < 0) {
            ke_sleep_ns(10000000); /* out of descriptors, say */
            continue;
        }
        note(0, c);
        if (start_thread(answer_one, (void *)(intptr_t)c) != 0) {
            note(c, 0);
            close(c);
        }
    }
}

/* Paths of sockets are limited to 108 bytes: go through the directory's descriptor. */
int ke_open_control(void) {
    char path[4096];
    snprintf(path, sizeof path, "%s.d", ke_state_path());
    return open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
}

static CUresult listen_failed(const char *what) {
    fprintf(stderr, "kiwi emulated driver: no control socket in %s.d: %s: %s\n", ke_state_path(), what,
            strerror(errno));
    if (listener >= 0) close(listener);
    listener = -1;
    return CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult ke_server_start(void) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    char name[16];
    if (listener >= 0) return CUDA_SUCCESS;
    if (directory < 0) directory = ke_open_control();
    if (directory < 0) return listen_failed("opening the directory");
    snprintf(name, sizeof name, "%d", getpid());
    unlinkat(directory, name, 0); /* left behind by a killed process with the same pid */
    snprintf(at.sun_path, sizeof at.sun_path, "/proc/self/fd/%d/%s", directory, name);
    listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (listener < 0) return listen_failed("socket");
    if (bind(listener, (struct sockaddr *)&at, sizeof at) != 0) return listen_failed("bind");
    if (listen(listener, BACKLOG) != 0) return listen_failed("listen");
    if (start_thread(accept_all, (void *)(intptr_t)listener) != 0) return listen_failed("thread");
    while (__atomic_load_n(&server_tid, __ATOMIC_ACQUIRE) == 0) ke_sleep_ns(100000);
    return CUDA_SUCCESS;
}

void ke_server_stop(void) {
    char name[16];
    snprintf(name, sizeof name, "%d", getpid());
    if (listener >= 0) unlinkat(directory, name, 0);
}

void ke_server_forget(void) { /* in a forked child; the parent goes on answering */
    for (int i = 0; i < BACKLOG; i++) {
        if (answering[i]) close(answering[i]);
        answering[i] = 0;
    }
    if (listener >= 0) close(listener);
    if (directory >= 0) close(directory);
    listener = directory = -1;
}
