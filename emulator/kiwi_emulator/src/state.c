/* The shared state file: its mapping, its lock, the books and the faults. Used by libcuda and by NVML. */
#define _GNU_SOURCE
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t once_lock = PTHREAD_MUTEX_INITIALIZER;
static struct ke_state *mapped;
static char *mapped_path;

uint64_t ke_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void ke_sleep_ns(uint64_t ns) {
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    while (nanosleep(&t, &t) == -1 && errno == EINTR) {
    }
}

/* ---- processes ---------------------------------------------------------------------------- */

int ke_process_start(int pid, uint64_t *start_ticks) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return -1;
    text[n] = 0;
    char *p = strrchr(text, ')'); /* the command name may contain blanks and brackets */
    if (!p || p[1] == 0) return -1;
    char run = p[2];
    if (run == 'Z' || run == 'X') return -1; /* ended, but its parent has not waited for it yet */
    p += 2;
    for (int field = 3; field < 22; field++) {
        p = strchr(p, ' ');
        if (!p) return -1;
        p++;
    }
    *start_ticks = strtoull(p, NULL, 10);
    return 0;
}

int ke_process_leader(int tid) {
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%d/status", tid);
    FILE *f = fopen(path, "re");
    if (!f) return -1;
    int leader = -1;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "Tgid: %d", &leader) == 1) break;
    }
    fclose(f);
    return leader;
}

/* Returns a hash (FNV-1a) of the addresses that the kernel chose for the process's program; 0: they cannot be read. */
static uint64_t image_of(int pid) {
    char path[64];
    unsigned char vector[1024];
    uint64_t hash = 0xcbf29ce484222325u;
    snprintf(path, sizeof path, "/proc/%d/auxv", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, vector, sizeof vector);
    close(fd);
    for (ssize_t i = 0; i < n; i++) hash = (hash ^ vector[i]) * 0x100000001b3u;
    return n > 0 ? hash : 0;
}

/* Returns whether the process still runs its program: exec closes the driver's files, and the driver drops what it had
 * of the old program. */
static int same_program(const struct ke_proc *p, int pid) {
    uint64_t image = p->image ? image_of(pid) : 0;
    return !image || image == p->image;
}

/* ---- what outlives a process: a forked child has its open files, and the driver frees memory at the last close ---- */

#define LOCKS_AT (1ll << 40) /* beyond the end of the state file: one byte for each slot */

static int device_file = -1; /* this process's, as /dev/nvidia-uvm; closed by exec, inherited by fork */

static struct flock slot_lock(const struct ke_state *s, const struct ke_proc *p, short type) {
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = LOCKS_AT + (p - s->procs), .l_len = 1};
}

/* Opens the device file, and locks the slot by it for as long as it or a copy in a forked child is open. */
static void open_device(const struct ke_state *s, const struct ke_proc *p) {
    if (device_file >= 0) close(device_file);
    device_file = open(ke_state_path(), O_RDWR | O_CLOEXEC);
    struct flock lock = slot_lock(s, p, F_WRLCK);
    if (device_file >= 0) fcntl(device_file, F_OFD_SETLK, &lock);
}

/* Returns whether a process has the device file of the slot open. Without a descriptor to look with: yes. */
static int device_is_open(const struct ke_state *s, const struct ke_proc *p) {
    struct flock lock = slot_lock(s, p, F_WRLCK);
    int fd = open(ke_state_path(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return errno == EMFILE || errno == ENFILE;
    int found = fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
    close(fd);
    return found;
}

/* Ends what the slot's process had. Forked children that live on keep its memory, which belongs to no process then. */
static void end_slot(const struct ke_state *s, struct ke_proc *p) {
    if (!device_is_open(s, p)) {
        memset(p, 0, sizeof *p);
        return;
    }
    for (unsigned i = 0; i < KE_GPUS_MAX; i++) {
        p->kept_bytes[i] += p->device_bytes[i] + p->context_bytes[i];
        p->device_bytes[i] = p->context_bytes[i] = p->parked_bytes[i] = 0;
        p->busy_ns[i] = p->busy_since_ns[i] = 0;
    }
    p->restores = 0;
    p->start_ticks = 0; /* a process that gets the same pid is another one */
}

/* Returns whether the slot's process lives. The caller may have no descriptor left, so a process counts as ended only if
 * the kernel says so. A process that is not visible here counts as living. */
static int alive(const struct ke_state *s, const struct ke_proc *p) {
    uint64_t ticks;
    int pid = ke_pid_here(s, p);
    if (pid <= 0) return pid == 0;
    errno = 0;
    if (ke_process_start(pid, &ticks) == 0) return ticks == p->start_ticks && same_program(p, pid);
    return errno != 0 && errno != ENOENT && errno != ESRCH;
}

/* ---- PID namespaces: each process writes the pid that it knows, and each reader translates it ----- */

uint64_t ke_own_pid_ns(void) {
    struct stat st;
    return stat("/proc/self/ns/pid", &st) == 0 ? st.st_ino : 0;
}

/* Asks the kernel for the peer of a connection to the process's socket: it gives the pid in the caller's
 * namespace. */
static int asked_pid(const struct ke_proc *p) {
    struct ucred who;
    socklen_t size = sizeof who;
    int fd = ke_control_connect(p->pid_ns, p->pid, SOCK_NONBLOCK);
    if (fd < 0) return errno == ENOENT || errno == ECONNREFUSED ? -1 : 0;
    int pid = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 ? who.pid : 0;
    close(fd);
    return pid;
}

int ke_pid_here(const struct ke_state *s, const struct ke_proc *p) {
    static struct { /* by slot, under the shared lock */
        uint64_t ns, start_ticks;
        int reader, pid, here;
    } known[KE_PROCS_MAX];
    static uint64_t own_ns;
    static int own_pid; /* a forked child may be in another namespace */
    if (own_pid != getpid()) {
        own_pid = getpid();
        own_ns = ke_own_pid_ns();
    }
    if (p->pid_ns == own_ns) return p->pid;
    long i = p - s->procs;
    if (known[i].reader == own_pid && known[i].ns == p->pid_ns && known[i].pid == p->pid &&
        known[i].start_ticks == p->start_ticks)
        return known[i].here;
    int here = asked_pid(p);
    if (here >= 0) {
        known[i].ns = p->pid_ns;
        known[i].start_ticks = p->start_ticks;
        known[i].reader = own_pid;
        known[i].pid = p->pid;
        known[i].here = here;
    }
    return here;
}

/* ---- mapping the file ----------------------------------------------------------------------- */

/* Initialises the mutex in the first process on the machine. flock makes the others wait; the kernel releases the flock
 * if the first process dies meanwhile. */
static int make_mutex(struct ke_state *s, int fd) {
    if (flock(fd, LOCK_EX) != 0) return -1;
    if (!__atomic_load_n(&s->mutex_ready, __ATOMIC_ACQUIRE)) {
        pthread_mutexattr_t a;
        pthread_mutexattr_init(&a);
        pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&s->lock.mutex, &a);
        pthread_mutexattr_destroy(&a);
        __atomic_store_n(&s->mutex_ready, 1u, __ATOMIC_RELEASE);
    }
    flock(fd, LOCK_UN);
    return 0;
}

static struct ke_state *map_file(const char *path, const char **why) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        *why = "the file named by KIWI_EMULATOR_STATE cannot be opened for reading and writing";
        return NULL;
    }
    struct stat st;
    struct ke_state *s = MAP_FAILED;
    if (fstat(fd, &st) == 0 && st.st_size >= (off_t)sizeof *s)
        s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (s == MAP_FAILED || memcmp(s->magic, KE_MAGIC, 8) != 0 || s->layout != KE_LAYOUT ||
        s->gpu_count > KE_GPUS_MAX) {
        *why = "the file named by KIWI_EMULATOR_STATE is not a state file of this emulator version";
    } else if (make_mutex(s, fd) != 0) {
        *why = "the file named by KIWI_EMULATOR_STATE cannot be locked";
    } else {
        close(fd);
        return s;
    }
    if (s != MAP_FAILED) munmap(s, sizeof *s);
    close(fd);
    return NULL;
}

struct ke_state *ke_state_get(const char **why) {
    static const char *ignored;
    if (!why) why = &ignored;
    pthread_mutex_lock(&once_lock);
    if (!mapped) {
        const char *path = getenv("KIWI_EMULATOR_STATE");
        if (!path || !*path)
            *why = "KIWI_EMULATOR_STATE is not set; it must name the emulator's state file";
        else if ((mapped = map_file(path, why)))
            mapped_path = strdup(path);
    }
    struct ke_state *s = mapped;
    pthread_mutex_unlock(&once_lock);
    return s;
}

const char *ke_state_path(void) { return mapped_path ? mapped_path : ""; }

/* ---- the control sockets' names: paths are limited to 108 bytes, so they go through a descriptor ---- */

int ke_open_control(void) {
    char path[4096];
    snprintf(path, sizeof path, "%s.d", ke_state_path());
    return open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
}

void ke_control_name(char name[KE_CONTROL_NAME], uint64_t pid_ns, int pid) {
    snprintf(name, KE_CONTROL_NAME, "%llu-%d", (unsigned long long)pid_ns, pid);
}

int ke_control_connect(uint64_t pid_ns, int pid, int flags) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    char name[KE_CONTROL_NAME];
    ke_control_name(name, pid_ns, pid);
    int dir = ke_open_control();
    if (dir < 0) return -1;
    snprintf(to.sun_path, sizeof to.sun_path, "/proc/self/fd/%d/%s", dir, name);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0), why = errno;
    if (fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof to) != 0) {
        why = errno;
        close(fd);
        fd = -1;
    }
    close(dir);
    errno = why;
    return fd;
}

/* ---- the lock and the books ----------------------------------------------------------------- */

void ke_state_lock(struct ke_state *s) {
    int rc = pthread_mutex_lock(&s->lock.mutex);
    if (rc == EOWNERDEAD) { /* its owner was killed, whose slot is reaped like that of any dead process */
        if (s->write_seq & 1) s->write_seq++;
        pthread_mutex_consistent(&s->lock.mutex);
    } else if (rc != 0) {
        fprintf(stderr, "kiwi emulated driver: the state file's lock is broken (%s)\n", strerror(rc));
        abort();
    }
    __atomic_add_fetch(&s->write_seq, 1, __ATOMIC_ACQ_REL);
}

void ke_state_unlock(struct ke_state *s) {
    __atomic_add_fetch(&s->write_seq, 1, __ATOMIC_ACQ_REL);
    pthread_mutex_unlock(&s->lock.mutex);
}

struct ke_proc *ke_proc_register(struct ke_state *s) {
    uint64_t ticks = 0;
    struct ke_proc *p = NULL;
    ke_process_start(getpid(), &ticks);
    ke_state_lock(s);
    ke_reap(s);
    for (int i = 0; i < KE_PROCS_MAX; i++) { /* without address randomisation, only this loop notices an exec */
        if (ke_proc_ours(&s->procs[i]) && s->procs[i].start_ticks) end_slot(s, &s->procs[i]);
        if (!p && s->procs[i].pid == 0) p = &s->procs[i];
    }
    if (p) {
        memset(p, 0, sizeof *p);
        p->start_ticks = ticks;
        p->pid_ns = ke_own_pid_ns();
        p->image = image_of(getpid());
        p->since_ns = ke_now_ns();
        open_device(s, p);
        p->pid = getpid(); /* last: a slot with a pid is complete */
    }
    ke_state_unlock(s);
    return p;
}

int ke_proc_ours(const struct ke_proc *p) { return p->pid == getpid() && p->pid_ns == ke_own_pid_ns(); }

void ke_proc_unregister(struct ke_state *s, struct ke_proc *p) {
    ke_state_lock(s);
    if (ke_proc_ours(p)) {
        if (device_file >= 0) close(device_file);
        device_file = -1;
        end_slot(s, p);
    }
    ke_state_unlock(s);
}

/* Returns whether a process was killed while restored and live, which hung hosts (cuda-checkpoint #53). A process that
 * ends by itself has no slot here. */
static bool took_host_down(const struct ke_state *s, const struct ke_proc *p) {
    return s->quirks & KE_KILL_TAKES_HOST_DOWN && p->restores && p->state != KE_CHECKPOINTED;
}

void ke_reap(struct ke_state *s) {
    for (int i = 0; i < KE_PROCS_MAX; i++) {
        struct ke_proc *p = &s->procs[i];
        if (!p->pid || alive(s, p)) continue;
        if (p->start_ticks && took_host_down(s, p) && !s->host_down) s->host_down = p->pid;
        end_slot(s, p);
    }
}

struct ke_proc *ke_proc_find(struct ke_state *s, int pid) {
    for (int i = 0; i < KE_PROCS_MAX; i++) {
        struct ke_proc *p = &s->procs[i];
        if (p->pid && ke_pid_here(s, p) == pid && alive(s, p)) return p;
    }
    return NULL;
}

int ke_process_held(struct ke_state *s) {
    bool held = false;
    for (int i = 0; i < KE_PROCS_MAX && !held; i++) /* without the lock, as most processes are not held */
        held = s->procs[i].pid == getpid() && __atomic_load_n(&s->procs[i].state, __ATOMIC_ACQUIRE) != KE_RUNNING;
    if (!held) return 0;
    ke_state_lock(s); /* the slot may be that of a process that has ended, or of another PID namespace */
    const struct ke_proc *p = ke_proc_find(s, getpid());
    held = p && p->state != KE_RUNNING;
    ke_state_unlock(s);
    return held;
}

uint64_t ke_gpu_used(const struct ke_state *s, unsigned gpu) {
    uint64_t used = 0;
    for (int i = 0; i < KE_PROCS_MAX; i++) {
        const struct ke_proc *p = &s->procs[i];
        if (p->pid) used += p->device_bytes[gpu] + p->context_bytes[gpu] + p->kept_bytes[gpu];
    }
    return used;
}

int ke_charge(struct ke_state *s, struct ke_proc *p, unsigned gpu, int64_t device_delta,
              int64_t context_delta) {
    int rc = 0;
    int64_t want = device_delta + context_delta;
    uint64_t total = s->gpus[gpu].total_bytes;
    ke_state_lock(s);
    if (!ke_proc_ours(p)) {
        ke_state_unlock(s);
        return want > 0 ? -1 : 0;
    }
    if (want > 0 && ke_gpu_used(s, gpu) + (uint64_t)want > total) {
        ke_reap(s); /* reads /proc once per process, so it is called only if it can matter */
        if (ke_gpu_used(s, gpu) + (uint64_t)want > total) rc = -1;
    }
    if (rc == 0) {
        p->device_bytes[gpu] += (uint64_t)device_delta;
        p->context_bytes[gpu] += (uint64_t)context_delta;
    }
    ke_state_unlock(s);
    return rc;
}

/* ---- faults --------------------------------------------------------------------------------- */

struct ke_fault *ke_fault_take(struct ke_state *s, enum ke_fault_kind kind, int pid, enum ke_op op) {
    struct ke_fault *taken = NULL;
    ke_state_lock(s);
    for (int i = 0; i < KE_FAULTS_MAX && !taken; i++) {
        struct ke_fault *f = &s->faults[i];
        if (__atomic_load_n(&f->kind, __ATOMIC_ACQUIRE) != (uint32_t)kind || f->count == 0) continue;
        if (f->pid != 0 && f->pid != pid) continue;
        bool meant = f->op == (uint32_t)op || (f->op == KE_OP_ANY && op < KE_OP_NVML_MEMORY);
        if (kind == KE_FAULT_HANG && !meant) continue;
        if (f->count > 0) f->count--;
        f->hits++;
        if (kind == KE_FAULT_HANG) f->in_progress++;
        taken = f;
    }
    ke_state_unlock(s);
    return taken;
}

void ke_fault_hang(struct ke_state *s, int pid, enum ke_op op) {
    struct ke_fault *f = ke_fault_take(s, KE_FAULT_HANG, pid, op);
    if (!f) return;
    uint64_t duration = f->duration_ns, start = ke_now_ns();
    while (__atomic_load_n(&f->kind, __ATOMIC_ACQUIRE) == KE_FAULT_HANG &&
           (duration == 0 || ke_now_ns() - start < duration))
        ke_sleep_ns(10000000);
    ke_state_lock(s);
    if (f->in_progress) f->in_progress--;
    ke_state_unlock(s);
}
