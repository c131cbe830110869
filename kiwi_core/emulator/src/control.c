/* The caller's side of the checkpoint API.  Works without cuInit, on the caller itself too, and
 * never passes the caller's own gate; custom storage (custom.c) needs both. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "emu.h"

/* Like the real driver, takes any thread id for its process.  A target that is not there is an
 * invalid value; one that has not initialised CUDA says so. */
static CUresult find_target(int pid, int *leader) {
    uint64_t ticks;
    if (!ke_state_get(NULL)) return CUDA_ERROR_NO_DEVICE;
    if (pid <= 0) return CUDA_ERROR_INVALID_VALUE;
    *leader = ke_process_leader(pid);
    if (*leader <= 0 || ke_process_start(*leader, &ticks) != 0) return CUDA_ERROR_INVALID_VALUE;
    struct ke_state *s = ke_state_get(NULL);
    ke_state_lock(s);
    bool known = ke_proc_find(s, *leader) != NULL;
    ke_state_unlock(s);
    return known ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult ke_connect(int pid, int *leader, int *fd) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    CUresult rc = find_target(pid, leader);
    if (rc != CUDA_SUCCESS) return rc;
    int dir = ke_open_control();
    if (dir < 0) return CUDA_ERROR_NOT_INITIALIZED;
    *fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    snprintf(to.sun_path, sizeof to.sun_path, "/proc/self/fd/%d/%d", dir, *leader);
    if (*fd >= 0 && connect(*fd, (struct sockaddr *)&to, sizeof to) != 0) {
        rc = errno == EACCES || errno == EPERM ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_NOT_INITIALIZED;
        close(*fd);
        *fd = -1;
    }
    close(dir);
    return rc == CUDA_SUCCESS && *fd < 0 ? CUDA_ERROR_NOT_INITIALIZED : rc;
}

static void take_descriptors(struct msghdr *m, int *fds) {
    struct cmsghdr *c = CMSG_FIRSTHDR(m);
    if (!c || c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) return;
    size_t bytes = c->cmsg_len - CMSG_LEN(0);
    memcpy(fds, CMSG_DATA(c), bytes < KE_ANSWER_FDS_MAX * sizeof *fds ? bytes : KE_ANSWER_FDS_MAX * sizeof *fds);
}

/* A target that dies while it works closes its end: an error, not a hang.  The descriptors that came
 * are the caller's to close, -1 where there was none. */
CUresult ke_ask(int fd, const struct ke_request *r, struct ke_answer *a, int *fds) {
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(KE_ANSWER_FDS_MAX * sizeof(int))];
    struct iovec text = {a, sizeof *a};
    struct msghdr m = {.msg_iov = &text, .msg_iovlen = 1};
    if (fds) {
        m.msg_control = control;
        m.msg_controllen = sizeof control;
        for (int i = 0; i < KE_ANSWER_FDS_MAX; i++) fds[i] = -1;
    }
    ssize_t n = send(fd, r, sizeof *r, MSG_NOSIGNAL);
    if (n == (ssize_t)sizeof *r) {
        do n = recvmsg(fd, &m, MSG_CMSG_CLOEXEC);
        while (n < 0 && errno == EINTR);
        if (fds && n > 0) take_descriptors(&m, fds);
    }
    return n == (ssize_t)sizeof *a ? (CUresult)a->result : CUDA_ERROR_OPERATING_SYSTEM;
}

static CUresult ask(int pid, const struct ke_request *r, int *value) {
    int leader, fd;
    struct ke_answer a;
    CUresult rc = ke_connect(pid, &leader, &fd);
    if (rc != CUDA_SUCCESS) return rc;
    rc = ke_ask(fd, r, &a, NULL);
    close(fd);
    if (value && rc == CUDA_SUCCESS) *value = a.value;
    return rc;
}

KE_API CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state) {
    int leader;
    if (!state) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = find_target(pid, &leader);
    if (rc != CUDA_SUCCESS) return rc;
    struct ke_state *s = ke_state_get(NULL);
    ke_fault_hang(s, leader, KE_OP_GET_STATE);
    ke_state_lock(s);
    struct ke_proc *p = ke_proc_find(s, leader);
    if (p) *state = (CUprocessState)p->state;
    ke_state_unlock(s);
    return p ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
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

/* To an older driver the field is one of those that must be zero. */
static bool custom_storage_known(void) {
    struct ke_state *s = ke_state_get(NULL);
    return s && s->driver_version >= KE_DRIVER_WITH_CUSTOM_STORAGE;
}

static CUresult custom(int pid, struct ke_request *r, CUcheckpointCustomStorageInfo **out) {
    KE_CALL(ke_custom_begin(pid, r, out));
}

KE_API CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args) {
    struct ke_request r = {.op = KE_OP_CHECKPOINT};
    size_t known = custom_storage_known() ? offsetof(CUcheckpointCheckpointArgs, reserved) : 0;
    if (args && !all_zero(args, known, sizeof *args)) return CUDA_ERROR_INVALID_VALUE;
    if (args && args->customStorageInfo_out) return custom(pid, &r, args->customStorageInfo_out);
    return ask(pid, &r, NULL);
}

KE_API CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args) {
    struct ke_request r = {.op = KE_OP_RESTORE};
    size_t known = custom_storage_known() ? offsetof(CUcheckpointRestoreArgs, reserved)
                                          : offsetof(CUcheckpointRestoreArgs, padding0);
    if (args && !all_zero(args, known, sizeof *args)) return CUDA_ERROR_INVALID_VALUE;
    if (args && args->gpuPairsCount > KE_GPUS_MAX) return CUDA_ERROR_INVALID_VALUE;
    if (args && args->gpuPairsCount && !args->gpuPairs) return CUDA_ERROR_INVALID_VALUE;
    r.pairs = args ? args->gpuPairsCount : 0;
    if (r.pairs) memcpy(r.pair, args->gpuPairs, r.pairs * sizeof *r.pair);
    if (args && args->customStorageInfo_out) return custom(pid, &r, args->customStorageInfo_out);
    return ask(pid, &r, NULL);
}

KE_API CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args) {
    struct ke_request r = {.op = KE_OP_UNLOCK};
    (void)args;
    return ask(pid, &r, NULL);
}
