/* A program whose exit handler, registered before it uses the GPU, saves GPU memory, as the destructor of a static C++
 * object does. It ends when its input ends; `silent`: without a call. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BYTES = 8 << 20 };
static int (*copy)(void *, unsigned long long, size_t);
static unsigned long long p;
static unsigned char *host;
static int silent;

static void save(void) {
    if (silent) return;
    memset(host, 0, BYTES);
    int result = copy(host, p, BYTES), wrong = 0;
    for (int i = 0; i < BYTES; i++) wrong += host[i] != (unsigned char)(i % 251 + 1);
    printf("copied %d, wrong bytes %d\n", result, wrong);
    fflush(stdout);
}

#define CALL(name, params, args)                                                                     \
    do {                                                                                             \
        int(*call) params = (int(*) params)dlsym(driver, #name);                                     \
        int result = call args;                                                                      \
        if (result) return printf("%s: %d\n", #name, result), 1;                                     \
    } while (0)

int main(int count, char **arguments) {
    (void)arguments;
    silent = count > 1;
    atexit(save);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    if (!driver) return puts(dlerror()), 1;
    copy = (int (*)(void *, unsigned long long, size_t))dlsym(driver, "cuMemcpyDtoH_v2");
    CALL(cuInit, (unsigned), (0));
    CALL(cuDevicePrimaryCtxRetain, (void **, int), (&context, 0));
    CALL(cuCtxSetCurrent, (void *), (context));
    CALL(cuMemAlloc_v2, (unsigned long long *, size_t), (&p, BYTES));
    host = malloc(BYTES);
    for (int i = 0; i < BYTES; i++) host[i] = (unsigned char)(i % 251 + 1);
    CALL(cuMemcpyHtoD_v2, (unsigned long long, const void *, size_t), (p, host, BYTES));
    puts("idle");
    fflush(stdout);
    char end;
    while (read(0, &end, 1) > 0) continue;
    return 0;
}
