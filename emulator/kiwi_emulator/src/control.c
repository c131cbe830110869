/* The caller's side of the checkpoint API. Works without cuInit, also on the caller itself, and never passes the
 * caller's own gate. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "emu.h"

/* With KE_SERIALISED_CALLER, calls about other processes run one at a time: nobody knows what the real driver does. */
static pthread_mutex_t one_call = PTHREAD_MUTEX_INITIALIZER;
static __thread bool serialised;

static void begin_call(void) {
    struct ke_state *s = ke_state_get(NULL);
    serialised = s && s->quirks & KE_SERIALISED_CALLER;
    if (serialised) pthread_mutex_lock(&one_call);
}

static CUresult end_call(CUresult rc) {
    if (serialised) pthread_mutex_unlock(&one_call);
    return rc;
}

void ke_control_forget(void) { one_call = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; }

static CUresult not_there(const struct ke_state *s) {
    return s->quirks & KE_MISSING_IS_OS_ERROR ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_INVALID_VALUE;
}

struct target {
    uint64_t pid_ns;
    int pid; /* in its own PID namespace */
    uint32_t state;
};

/* Finds the process of a thread id, as the real driver does. A zombie, or a process that has not initialised CUDA,
 * is no target. */
static CUresult find_target(int pid, int *leader, struct target *target) {
    uint64_t ticks;
    struct ke_state *s = ke_state_get(NULL);
    if (!s) return CUDA_ERROR_NO_DEVICE;
    if (pid <= 0) return CUDA_ERROR_INVALID_VALUE;
    *leader = ke_process_leader(pid);
    if (*leader <= 0) return not_there(s);
    bool zombie = ke_process_start(*leader, &ticks) != 0;
    if (zombie) return s->quirks & KE_MISSING_IS_OS_ERROR ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_INVALID_VALUE;
    ke_state_lock(s);
    const struct ke_proc *known = ke_proc_find(s, *leader);
    if (known) *target = (struct target){known->pid_ns, known->pid, known->state};
    ke_state_unlock(s);
    return known ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

/* Returns the error for a target that does not answer, because it has ended or is ending. */
static CUresult gone_since(int leader) {
    uint64_t ticks;
    struct ke_state *s = ke_state_get(NULL);
    bool ended = ke_process_start(leader, &ticks) != 0 && s->quirks & KE_MISSING_IS_OS_ERROR;
    return ended ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_NOT_INITIALIZED;
}

static CUresult connect_to(int pid, int *leader, int *fd) {
    struct target target;
    CUresult rc = find_target(pid, leader, &target);
    if (rc != CUDA_SUCCESS) return rc;
    *fd = ke_control_connect(target.pid_ns, target.pid, 0);
    if (*fd >= 0) return CUDA_SUCCESS;
    return errno == EACCES || errno == EPERM ? CUDA_ERROR_NOT_PERMITTED : gone_since(*leader);
}

/* Sends a request and waits for the answer. A target that dies meanwhile closes its end: an error, not a hang. */
static CUresult exchange(int fd, const struct ke_request *r, struct ke_answer *a) {
    ssize_t n = send(fd, r, sizeof *r, MSG_NOSIGNAL);
    if (n == (ssize_t)sizeof *r) {
        do n = recv(fd, a, sizeof *a, 0);
        while (n < 0 && errno == EINTR);
    }
    return n == (ssize_t)sizeof *a ? (CUresult)a->result : CUDA_ERROR_OPERATING_SYSTEM;
}

static CUresult ask(int pid, const struct ke_request *r, int *value) {
    int leader, fd;
    struct ke_answer a;
    begin_call();
    CUresult rc = connect_to(pid, &leader, &fd);
    if (rc != CUDA_SUCCESS) return end_call(rc);
    rc = exchange(fd, r, &a);
    close(fd);
    if (value && rc == CUDA_SUCCESS) *value = a.value;
    return end_call(rc);
}

/* Reads the state from the books: a driver without the quirk answers even while the target cannot. */
static CUresult look_up_state(int pid, int *state) {
    int leader;
    struct target target;
    CUresult rc = find_target(pid, &leader, &target);
    if (rc == CUDA_SUCCESS) *state = (int)target.state;
    return rc;
}

KE_API CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state) {
    int leader, found = 0;
    struct target target;
    struct ke_state *s = ke_state_get(NULL);
    struct ke_request r = {.op = KE_OP_GET_STATE};
    if (!state) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = find_target(pid, &leader, &target);
    if (rc != CUDA_SUCCESS) return rc;
    begin_call();
    ke_fault_hang(s, leader, KE_OP_GET_STATE);
    end_call(CUDA_SUCCESS);
    rc = s->quirks & KE_STATE_WAITS ? ask(pid, &r, &found) : look_up_state(pid, &found);
    if (rc == CUDA_SUCCESS) *state = (CUprocessState)found;
    return rc;
}

KE_API CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
    struct ke_request r = {.op = KE_OP_RESTORE_TID};
    return tid ? ask(pid, &r, tid) : CUDA_ERROR_INVALID_VALUE;
}

KE_API CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args) {
    struct ke_request r = {.op = KE_OP_LOCK, .timeout_ms = args ? args->timeoutMs : 0};
    return args && args->reserved0 ? CUDA_ERROR_INVALID_VALUE : ask(pid, &r, NULL);
}

static bool all_zero(const void *p, size_t from, size_t to) {
    const char *bytes = p;
    while (from < to && bytes[from] == 0) from++;
    return from == to;
}

KE_API CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args) {
    struct ke_request r = {.op = KE_OP_CHECKPOINT};
    if (args && !all_zero(args, 0, sizeof *args)) return CUDA_ERROR_INVALID_VALUE;
    return ask(pid, &r, NULL);
}

KE_API CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args) {
    struct ke_request r = {.op = KE_OP_RESTORE};
    size_t known = offsetof(CUcheckpointRestoreArgs, gpuPairsCount) + sizeof args->gpuPairsCount;
    if (args && !all_zero(args, known, sizeof *args)) return CUDA_ERROR_INVALID_VALUE;
    if (args && args->gpuPairsCount > KE_GPUS_MAX) return CUDA_ERROR_INVALID_VALUE;
    if (args && args->gpuPairsCount && !args->gpuPairs) return CUDA_ERROR_INVALID_VALUE;
    r.pairs = args ? args->gpuPairsCount : 0;
    if (r.pairs) memcpy(r.pair, args->gpuPairs, r.pairs * sizeof *r.pair);
    return ask(pid, &r, NULL);
}

KE_API CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args) {
    struct ke_request r = {.op = KE_OP_UNLOCK};
    (void)args;
    return ask(pid, &r, NULL);
}
