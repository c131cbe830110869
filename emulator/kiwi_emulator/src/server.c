/* The control socket <state>.d/<PID namespace>-<pid> of a target: one thread accepts, and each connection has a thread of its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "emu.h"

#define BACKLOG 64
#define MEND_EVERY_MS 500 /* less often than a daemon checks its own socket */

static int listener = -1, directory = -1;
static pid_t server_tid;

/* Connections in use: a forked child must close its copies, or a caller would wait for a killed target for as long as
 * the child lives. */
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

static void answer(int fd, CUresult rc, int value) { /* the caller may be gone; the operation stays done */
    struct ke_answer a = {(int32_t)rc, value};
    send(fd, &a, sizeof a, MSG_NOSIGNAL);
}

static void *answer_one(void *arg) {
    int fd = (int)(intptr_t)arg;
    struct ke_request r;
    if (recv(fd, &r, sizeof r, 0) == (ssize_t)sizeof r) {
        if (!may_ask(fd)) answer(fd, CUDA_ERROR_NOT_PERMITTED, 0);
        else if (r.op == KE_OP_RESTORE_TID) answer(fd, CUDA_SUCCESS, server_tid);
        else if (r.op == KE_OP_GET_STATE) answer(fd, CUDA_SUCCESS, ke_target_state());
        else answer(fd, ke_target_serve(&r), 0);
    }
    note(fd, 0);
    close(fd);
    return NULL;
}

static void mend_name(void);

static void *accept_all(void *unused) {
    (void)unused;
    __atomic_store_n(&server_tid, (pid_t)syscall(SYS_gettid), __ATOMIC_RELEASE);
    for (;;) {
        struct pollfd polled = {.fd = listener, .events = POLLIN};
        if (poll(&polled, 1, MEND_EVERY_MS) == 0) {
            mend_name();
            continue;
        }
        int c = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (c < 0 && (errno == EBADF || errno == EINVAL)) return NULL;
        if (c < 0) {
            ke_sleep_ns(10000000); /* out of descriptors, say */
            continue;
        }
        note(0, c);
        if (ke_start_thread(answer_one, (void *)(intptr_t)c) != 0) {
            note(c, 0);
            close(c);
        }
    }
}

static int bound(int dir) { /* returns a listening socket in `dir`, named by our pid; -1: errno says why */
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    char name[KE_CONTROL_NAME];
    ke_control_name(name, ke_own_pid_ns(), getpid());
    unlinkat(dir, name, 0); /* left behind by a killed process with the same pid */
    snprintf(at.sun_path, sizeof at.sun_path, "/proc/self/fd/%d/%s", dir, name);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0) return fd;
    /* Everybody may connect, whatever the umask is, and may_ask decides: a root without CAP_DAC_OVERRIDE, as in a
     * container, could not connect to another user's socket. The file never has a wider mode. */
    if (!fchmod(fd, 0666) && !bind(fd, (struct sockaddr *)&at, sizeof at) && !fchmodat(dir, name, 0666, 0) &&
        !listen(fd, BACKLOG))
        return fd;
    int why = errno;
    close(fd);
    errno = why;
    return -1;
}

/* Binds the socket again if the directory was removed and made again. The real driver needs no directory, so
 * its targets stay reachable. */
static void mend_name(void) {
    struct stat is, was;
    int dir = ke_open_control();
    if (dir < 0) return;
    bool same = !fstat(dir, &is) && !fstat(directory, &was) && is.st_ino == was.st_ino && is.st_dev == was.st_dev;
    int fd = same ? -1 : bound(dir);
    if (fd < 0) {
        close(dir);
        return;
    }
    close(listener);
    close(directory);
    listener = fd;
    directory = dir;
}

static CUresult listen_failed(const char *what) {
    fprintf(stderr, "kiwi emulated driver: no control socket in %s.d: %s: %s\n", ke_state_path(), what,
            strerror(errno));
    if (listener >= 0) close(listener);
    listener = -1;
    return CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult ke_server_listen(void) {
    if (listener >= 0) return CUDA_SUCCESS;
    if (directory < 0) directory = ke_open_control();
    if (directory < 0) return listen_failed("opening the directory");
    listener = bound(directory);
    return listener < 0 ? listen_failed("listening") : CUDA_SUCCESS;
}

CUresult ke_server_answer(void) {
    if (server_tid) return CUDA_SUCCESS;
    if (ke_start_thread(accept_all, NULL) != 0) return listen_failed("thread");
    while (__atomic_load_n(&server_tid, __ATOMIC_ACQUIRE) == 0) ke_sleep_ns(100000);
    return CUDA_SUCCESS;
}

void ke_server_stop(void) {
    char name[KE_CONTROL_NAME];
    ke_control_name(name, ke_own_pid_ns(), getpid());
    if (listener >= 0) unlinkat(directory, name, 0);
}

void ke_server_forget(void) { /* called in a forked child; the parent goes on answering */
    for (int i = 0; i < BACKLOG; i++) {
        if (answering[i]) close(answering[i]);
        answering[i] = 0;
    }
    if (listener >= 0) close(listener);
    if (directory >= 0) close(directory);
    listener = directory = -1;
}
