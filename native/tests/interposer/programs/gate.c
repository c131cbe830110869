/* Tests the gate from a program: gate SCENARIO [without-membarrier], on odd_driver.c under the library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000ll
#define SOON (SECOND / 50)
#define LONG (60 * SECOND)

static int (*init)(unsigned), (*fill)(unsigned long long, unsigned char, size_t);
static int (*info)(size_t *, size_t *), (*synchronize)(void *), (*free_)(unsigned long long);
static int (*begin_capture)(void *, int), (*end_capture)(void *, void **), (*destroy)(void *);
static int (*set_current)(void *), (*query)(void *);
static int (*close_gate)(int64_t), (*shut_gate)(int64_t);
static void (*open_gate)(void), (*arm)(int);
static unsigned (*inside)(void), (*inside_any)(void);
static uint64_t (*passed)(void);
static int *forbidden, *broken, *hold, *held;

#define EXPECT(what)                                                                                 \
    do {                                                                                             \
        if (!(what)) printf("line %d: not so: %s\n", __LINE__, #what), exit(1);                      \
    } while (0)

static void nap(void) { nanosleep(&(struct timespec){0, 2000000}, NULL); }
#define AWAIT(what)                                                                                  \
    do {                                                                                             \
        for (int tries_ = 0; !(what); tries_++) {                                                    \
            EXPECT(tries_ < 20000);                                                                  \
            nap();                                                                                   \
        }                                                                                            \
    } while (0)
#define GET(flag) __atomic_load_n(flag, __ATOMIC_SEQ_CST)
#define SET(flag, value) __atomic_store_n(flag, value, __ATOMIC_SEQ_CST)

/* Returns whether a thread sleeps in the kernel, which here means at the gate. */
static int asleep(pid_t thread) {
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    int got = fgets(line, sizeof line, file) != NULL;
    fclose(file);
    char *after = got ? strrchr(line, ')') : NULL;
    return after && after[2] == 'S';
}

struct caller {
    pthread_t thread;
    pid_t tid;
    unsigned long long p;
    int done;
    int (*what)(void *); /* NULL: fill */
};

static void *call(void *arg) {
    struct caller *caller = arg;
    SET(&caller->tid, (pid_t)gettid());
    if (caller->what) caller->what((void *)(uintptr_t)caller->p);
    else fill(caller->p, 0, 1);
    SET(&caller->done, 1);
    return NULL;
}

static void start(struct caller *caller, unsigned long long p) {
    *caller = (struct caller){.p = p};
    pthread_create(&caller->thread, NULL, call, caller);
}

static void start_other(struct caller *caller, int (*what)(void *), unsigned long long p) {
    *caller = (struct caller){.p = p, .what = what};
    pthread_create(&caller->thread, NULL, call, caller);
}

static void waits(struct caller *caller) {
    AWAIT(GET(&caller->tid) && asleep(caller->tid));
    EXPECT(!GET(&caller->done));
}

static void goes_on(struct caller *caller) {
    pthread_join(caller->thread, NULL);
    EXPECT(caller->done);
}

/* ---- scenarios ---- */

static void closed(void) {
    struct caller a, b;
    EXPECT(close_gate(LONG) && close_gate(LONG)); /* a second close changes nothing */
    start(&a, 0), start(&b, 0);
    waits(&a), waits(&b);
    size_t x, y; /* waits, questions and frees are not held up */
    EXPECT(info(&x, &y) == 0 && synchronize(NULL) == 0 && free_(0) == 0);
    EXPECT(inside() == 0);
    open_gate();
    goes_on(&a), goes_on(&b);
    EXPECT(passed() == 2);
}

static void drains(void) {
    struct caller a, b;
    SET(hold, 1);
    start(&a, 1);
    AWAIT(GET(held));
    EXPECT(inside() == 1);
    EXPECT(!close_gate(SOON)); /* the close takes too long, and changes nothing */
    fill(0, 0, 1);
    EXPECT(!GET(&a.done));
    arm(1);
    EXPECT(!close_gate(SOON));
    start(&b, 0);
    waits(&b); /* the gate is armed as before */
    SET(hold, 0);
    EXPECT(close_gate(LONG)); /* the call ends by itself, in time */
    goes_on(&a);
    waits(&b);
    open_gate();
    waits(&b);
    arm(0);
    goes_on(&b);
}

static void armed(void) {
    struct caller a;
    arm(1);
    start(&a, 0);
    waits(&a);
    EXPECT(close_gate(LONG));
    arm(0);
    waits(&a); /* the gate is still closed */
    arm(1);
    open_gate();
    waits(&a); /* back to armed */
    arm(0);
    goes_on(&a);
}

static int free_pointer(void *p) { return free_((unsigned long long)(uintptr_t)p); }

/* No call of any class passes a shut gate; all go on when it opens. */
static void shut(void) {
    struct caller a, b[4];
    EXPECT(close_gate(LONG));
    start(&a, 0);
    waits(&a);
    EXPECT(shut_gate(LONG) && shut_gate(LONG));
    SET(forbidden, 1);
    start_other(&b[0], synchronize, 0), start_other(&b[1], set_current, 0);
    start_other(&b[2], free_pointer, 0), start_other(&b[3], query, 0);
    waits(&a);
    for (int i = 0; i < 4; i++) waits(&b[i]);
    AWAIT(inside_any() == 0);
    SET(forbidden, 0);
    open_gate();
    goes_on(&a);
    for (int i = 0; i < 4; i++) goes_on(&b[i]);
    EXPECT(GET(broken) == 0 && passed() == 1 && inside_any() == 0);
}

/* Shutting waits for a thread in a wait; closing does not. */
static void shut_drains(void) {
    struct caller a, b;
    SET(hold, 1);
    start_other(&a, synchronize, 1);
    AWAIT(GET(held));
    EXPECT(inside() == 0 && inside_any() == 1);
    EXPECT(close_gate(LONG));
    EXPECT(!shut_gate(SOON)); /* the shut takes too long: the gate is closed as before */
    start(&b, 0);
    waits(&b);
    EXPECT(query(NULL) == 0 && !GET(&a.done));
    SET(hold, 0);
    EXPECT(shut_gate(LONG));
    goes_on(&a); /* the thread was inside, and leaves */
    waits(&b);
    open_gate();
    goes_on(&b);
}

static volatile sig_atomic_t handled;
static void handler(int signal) { (void)signal, handled++; }

static void signals(void) {
    struct caller a;
    struct sigaction action = {.sa_handler = handler};
    sigaction(SIGUSR1, &action, NULL);
    EXPECT(close_gate(LONG));
    start(&a, 0);
    waits(&a);
    for (int i = 1; i <= 20; i++) {
        pthread_kill(a.thread, SIGUSR1);
        AWAIT(handled == i);
        waits(&a);
    }
    open_gate();
    goes_on(&a);
}

static pid_t closing;

static void *close_long(void *answer) {
    SET(&closing, (pid_t)gettid());
    SET((int *)answer, close_gate(LONG) ? 1 : 2);
    return NULL;
}

static void *begin_another(void *done) {
    EXPECT(begin_capture((void *)4, 0) == 0);
    SET((int *)done, 1);
    return NULL;
}

static void captures(void) {
    pthread_t closer, other;
    int answer = 0, began = 0;
    void *graph;
    EXPECT(begin_capture((void *)3, 0) == 0);
    EXPECT(!close_gate(SOON));
    EXPECT(end_capture((void *)99, &graph) == 908); /* refused: the capture goes on */
    EXPECT(!close_gate(SOON));
    arm(1); /* there is no lease, but the capture must be able to end */
    fill(0, 0, 1);
    arm(0);
    pthread_create(&closer, NULL, close_long, &answer);
    AWAIT(GET(&closing) && asleep(closing)); /* it waits for the capture to end */
    for (int i = 0; i < 20; i++) fill(0, 0, 1), nap(); /* the capture's own calls go on */
    EXPECT(!GET(&answer));
    pthread_create(&other, NULL, begin_another, &began); /* a new capture waits */
    for (int i = 0; i < 20; i++) nap();
    EXPECT(!GET(&began));
    EXPECT(begin_capture((void *)5, 0) == 0); /* but not one of a thread that has a capture open */
    EXPECT(end_capture((void *)5, &graph) == 0 && !GET(&answer));
    EXPECT(end_capture((void *)3, &graph) == 0);
    pthread_join(closer, NULL);
    EXPECT(answer == 1 && !GET(&began));
    open_gate();
    pthread_join(other, NULL);
    EXPECT(!close_gate(SOON));
    EXPECT(destroy((void *)4) == 0); /* destroying a stream ends its capture */
    EXPECT(close_gate(LONG));
}

static int stop;
static void *hammer(void *count) {
    while (!GET(&stop)) {
        fill(0, 0, 20);
        ++*(long *)count;
    }
    return NULL;
}

static void *hammer_all(void *count) {
    while (!GET(&stop)) {
        fill(0, 0, 20);
        EXPECT(!synchronize(NULL) && !query(NULL) && !set_current(NULL) && !free_(0));
        ++*(long *)count;
    }
    return NULL;
}

static void stress_with(void *(*work)(void *), int shuts) {
    enum { THREADS = 8 };
    pthread_t threads[THREADS];
    long counts[THREADS] = {0};
    uint64_t before = passed();
    for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, &counts[i]);
    for (int round = 0; round < 60; round++) {
        if (round % 3 == 1) arm(1);
        EXPECT(close_gate(LONG));
        if (shuts) EXPECT(shut_gate(LONG));
        SET(forbidden, 1);
        AWAIT((shuts ? inside_any() : inside()) == 0); /* a thread that finds it shut is counted for an instant */
        nap();
        SET(forbidden, 0);
        open_gate();
        arm(0);
        uint64_t now = passed();
        AWAIT(passed() > now + 100);
    }
    SET(&stop, 1);
    long sum = 0;
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL), sum += counts[i];
    EXPECT(GET(broken) == 0);
    EXPECT(inside_any() == 0 && passed() - before == (uint64_t)sum);
}
static void stress(void) { stress_with(hammer, 0); }
static void stress_shut(void) { stress_with(hammer_all, 1); }

enum { CROWD = 1100 }; /* more than there are seats */
static pthread_barrier_t all_met;

static void *call_twice(void *unused) {
    fill(0, 0, 1);
    pthread_barrier_wait(&all_met);
    pthread_barrier_wait(&all_met);
    fill(0, 0, 1);
    synchronize(NULL);
    return unused;
}

static void crowd(void) {
    static pthread_t threads[CROWD];
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 65536);
    pthread_barrier_init(&all_met, NULL, CROWD + 1);
    for (int i = 0; i < CROWD; i++) EXPECT(!pthread_create(&threads[i], &small, call_twice, NULL));
    pthread_barrier_wait(&all_met);
    EXPECT(passed() == CROWD && inside() == 0);
    EXPECT(close_gate(LONG) && shut_gate(LONG));
    SET(forbidden, 1);
    pthread_barrier_wait(&all_met);
    for (int i = 0; i < 20; i++) nap();
    SET(forbidden, 0);
    open_gate();
    for (int i = 0; i < CROWD; i++) pthread_join(threads[i], NULL);
    EXPECT(GET(broken) == 0 && passed() == 2 * CROWD && inside_any() == 0);
    struct caller a; /* the seats are free again: this thread gets one */
    start(&a, 0);
    goes_on(&a);
    EXPECT(close_gate(LONG));
}

/* Forbids membarrier(2), as some kernels and sandboxes do. */
static void forbid_membarrier(void) {
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog filter = {sizeof program / sizeof *program, program};
    EXPECT(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter));
    EXPECT(syscall(SYS_membarrier, 0, 0, 0) == -1 && errno == ENOSYS);
}

/* The child of a program that uses the driver is never held up, whatever the state of the gate was. */
static void forks(void) {
    EXPECT(close_gate(LONG) && shut_gate(LONG));
    pid_t child = fork();
    if (child == 0) _exit(fill(0, 0, 1) == 0 && free_(0) == 0 && synchronize(NULL) == 0 ? 7 : 8);
    int status;
    EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
    struct caller a;
    start(&a, 0);
    waits(&a); /* the parent's gate is as it was */
    open_gate();
    goes_on(&a);
}

/* The child of a program that does not use the driver is a program like any other, even if another thread was inside
 * at the fork. */
static void forks_before(void) {
    struct caller a;
    SET(hold, 1);
    start(&a, 1);
    AWAIT(GET(held));
    pid_t child = fork();
    if (child == 0) {
        EXPECT(inside() == 0 && init(0) == 0 && close_gate(LONG));
        struct caller b;
        start(&b, 0);
        waits(&b);
        open_gate();
        goes_on(&b);
        _exit(7);
    }
    int status;
    EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
    SET(hold, 0);
    goes_on(&a);
}

/* A program ends although one of its threads waits at the closed gate. */
static void exits(void) {
    static struct caller a;
    EXPECT(close_gate(LONG));
    start(&a, 0);
    waits(&a);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
        int before_init;
    } scenarios[] = {{"closed", closed, 0},     {"drains", drains, 0}, {"armed", armed, 0},
                     {"signals", signals, 0},   {"captures", captures, 0}, {"stress", stress, 0},
                     {"forks", forks, 0},       {"forks-before", forks_before, 1}, {"exits", exits, 0},
                     {"crowd", crowd, 0},      {"shut", shut, 0},   {"shut-drains", shut_drains, 0},
                     {"stress-shut", stress_shut, 0}};
    if (argc == 3) forbid_membarrier(); /* before the library looks for it */
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    struct { void *to; const char *name; } needed[] = {
        {&init, "cuInit"}, {&fill, "cuMemsetD8_v2"}, {&info, "cuMemGetInfo_v2"},
        {&synchronize, "cuStreamSynchronize"}, {&free_, "cuMemFree_v2"},
        {&begin_capture, "cuStreamBeginCapture_v2"}, {&end_capture, "cuStreamEndCapture"},
        {&destroy, "cuStreamDestroy_v2"}, {&close_gate, "kiwi_preload_test_close"},
        {&set_current, "cuCtxSetCurrent"}, {&query, "cuStreamQuery"},
        {&shut_gate, "kiwi_preload_test_shut"}, {&inside_any, "kiwi_preload_test_inside_any"},
        {&open_gate, "kiwi_preload_test_open"}, {&arm, "kiwi_preload_test_arm"},
        {&inside, "kiwi_preload_test_inside"}, {&passed, "kiwi_preload_test_passed"},
        {&forbidden, "odd_forbidden"}, {&broken, "odd_broken"}, {&hold, "odd_hold"}, {&held, "odd_held"}};
    EXPECT(driver && argc >= 2);
    for (unsigned i = 0; i < sizeof needed / sizeof *needed; i++) {
        void *found = dlsym(driver, needed[i].name);
        if (!found) found = dlsym(RTLD_DEFAULT, needed[i].name);
        if (!found) return printf("no %s\n", needed[i].name), 1;
        memcpy(needed[i].to, &found, sizeof found);
    }
    for (unsigned i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
        if (strcmp(argv[1], scenarios[i].name) != 0) continue;
        if (!scenarios[i].before_init) EXPECT(init(0) == 0);
        scenarios[i].run();
        printf("ok\n");
        return 0;
    }
    return printf("no scenario %s\n", argv[1]), 1;
}
