/* Calls the functions that are named on the command line, each with nothing but null pointers and zeros, in a child of its
 * own, and prints what becomes of it. */
#include <dlfcn.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int any(size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t,
                size_t, size_t);

static int (*function(void *driver, const char *name))() { return (int (*)())dlsym(driver, name); }

static int call(const char *name) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context = NULL;
    unsigned long long p;
    if (!driver || function(driver, "cuInit")(0)) return 251;
    any *called = (any *)dlsym(driver, name);
    if (!called) return 252;
    if (function(driver, "cuDevicePrimaryCtxRetain")(&context, 0)) return 253;
    function(driver, "cuCtxSetCurrent")(context);
    if (function(driver, "cuMemAlloc_v2")(&p, (size_t)4096)) return 254; /* the library is at work now */
    int result = called(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    printf("%s %d\n", name, result);
    fflush(stdout);
    return 0;
}

int main(int count, char **names) {
    for (int i = 1; i < count; i++) {
        int status;
        pid_t child = fork();
        if (child == 0) _exit(call(names[i]));
        waitpid(child, &status, 0);
        if (status) printf("%s: %s %d\n", names[i], WIFSIGNALED(status) ? "killed" : "ended", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        fflush(stdout);
    }
    return 0;
}
