/* What a program may do beside the library, which has threads, descriptors and handlers of its own in it. The program
 * reads a word per line: what to do next. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static unsigned long long p;
static void *context;
static int (*fill)(unsigned long long, unsigned char, size_t);
static int (*alloc)(unsigned long long *, size_t);
static int (*count_gpus)(int *);
static int (*release)(int);

#define CALL(name, params, args)                                                                     \
    do {                                                                                             \
        int(*call) params = (int(*) params)dlsym(driver, #name);                                     \
        int result = call args;                                                                      \
        if (result) return printf("%s: %d\n", #name, result), 1;                                     \
    } while (0)

static sigjmp_buf out;
static void leave(int number) {
    (void)number;
    siglongjmp(out, 1);
}

/* A call that is held up, and a signal handler that does not return to it. */
static void leave_a_call(void) {
    signal(SIGUSR1, leave);
    if (sigsetjmp(out, 1)) puts("left");
    else printf("came back %d\n", fill(p, 1, 4096));
}

/* Likewise, in the wait for room. */
static void leave_an_allocation(void) {
    unsigned long long q;
    signal(SIGUSR1, leave);
    if (sigsetjmp(out, 1)) puts("left");
    else printf("came back %d\n", alloc(&q, 256 << 20)); /* the whole GPU: the context has a part of it */
}

/* A child that was made without the handlers of fork(): it ends, or calls the driver first. */
static void make_a_child(int bare, int calls) {
    int status = 0;
    pid_t child = bare ? (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : _Fork();
    if (child == 0) {
        unsigned long long q;
        int count;
        if (!calls) exit(0);
        alarm(20); /* if it hangs, the test must not */
        int first = count_gpus(&count), second = alloc(&q, 4096);
        _exit(first * 16 + second);
    }
    waitpid(child, &status, 0);
    printf("child %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
}

int main(void) {
    char word[64];
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) return puts(dlerror()), 1;
    CALL(cuInit, (unsigned), (0));
    CALL(cuDevicePrimaryCtxRetain, (void **, int), (&context, 0));
    CALL(cuCtxSetCurrent, (void *), (context));
    CALL(cuMemAlloc_v2, (unsigned long long *, size_t), (&p, 4096));
    fill = (int (*)(unsigned long long, unsigned char, size_t))dlsym(driver, "cuMemsetD8_v2");
    alloc = (int (*)(unsigned long long *, size_t))dlsym(driver, "cuMemAlloc_v2");
    count_gpus = (int (*)(int *))dlsym(driver, "cuDeviceGetCount");
    release = (int (*)(int))dlsym(driver, "cuDevicePrimaryCtxRelease_v2");
    setlinebuf(stdout);
    puts("begun");
    while (scanf("%63s", word) == 1) {
        if (!strcmp(word, "fill")) printf("filled %d\n", fill(p, 1, 4096));
        else if (!strcmp(word, "leave")) leave_a_call();
        else if (!strcmp(word, "leave-alloc")) leave_an_allocation();
        else if (!strcmp(word, "release")) printf("released %d\n", release(0));
        else if (!strcmp(word, "_fork")) make_a_child(0, 0);
        else if (!strcmp(word, "clone")) make_a_child(1, 0);
        else if (!strcmp(word, "_fork-calls")) make_a_child(0, 1);
        else if (!strcmp(word, "clone-calls")) make_a_child(1, 1);
    }
    return 0;
}
