/* overhead CALL COUNT: makes a call COUNT times, looked up as programs do, and prints the processor time of one call
 * in ns.
 * Under callgrind, the difference between two counts gives the instructions of one call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long pointer;
typedef int get_proc_fn(const char *, void **, int, unsigned long long, int *);

static void *proc(get_proc_fn *get, const char *name) {
    void *found = NULL;
    int how;
    if (get(name, &found, 12000, 0, &how) || !found) printf("no %s\n", name), exit(1);
    return found;
}

static void must(int result) {
    if (result) printf("the driver says %d\n", result), exit(1);
}

#define GET(name, type) __typeof__(type) name = (__typeof__(type))proc(get, #name)

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    long count = atol(argv[2]);
    get_proc_fn *get = (get_proc_fn *)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGetProcAddress_v2");
    GET(cuInit, int (*)(unsigned));
    GET(cuDevicePrimaryCtxRetain, int (*)(void **, int));
    GET(cuCtxSetCurrent, int (*)(void *));
    GET(cuMemAlloc, int (*)(pointer *, size_t));
    GET(cuModuleLoadData, int (*)(void **, const void *));
    GET(cuModuleGetFunction, int (*)(void **, void *, const char *));
    GET(cuStreamCreate, int (*)(void **, unsigned));
    GET(cuStreamSynchronize, int (*)(void *));
    GET(cuEventCreate, int (*)(void **, unsigned));
    GET(cuEventRecord, int (*)(void *, void *));
    GET(cuMemcpyHtoD, int (*)(pointer, const void *, size_t));
    GET(cuLaunchKernel, int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                unsigned, void *, void **, void **));
    void *context, *module, *kernel, *stream, *event;
    pointer p;
    must(cuInit(0));
    must(cuDevicePrimaryCtxRetain(&context, 0));
    must(cuCtxSetCurrent(context));
    must(cuMemAlloc(&p, 4096));
    must(cuModuleLoadData(&module, "kiwi-emulated-module"));
    must(cuModuleGetFunction(&kernel, module, "fill_u32"));
    must(cuStreamCreate(&stream, 1));
    must(cuEventCreate(&event, 0));
    uint64_t words = 1;
    uint32_t value = 7;
    void *parameters[] = {&p, &words, &value};
    struct timespec began, ended;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &began);
    if (!strcmp(argv[1], "launch")) {
        for (long i = 0; i < count; i++) {
            must(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
            if (i % 64 == 63) must(cuStreamSynchronize(stream));
        }
        must(cuStreamSynchronize(stream));
    } else if (!strcmp(argv[1], "wait")) {
        for (long i = 0; i < count; i++) must(cuStreamSynchronize(stream));
    } else if (!strcmp(argv[1], "record")) {
        for (long i = 0; i < count; i++) must(cuEventRecord(event, stream));
    } else {
        for (long i = 0; i < count; i++) must(cuMemcpyHtoD(p, &value, sizeof value));
    }
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ended);
    double ns = (double)(ended.tv_sec - began.tv_sec) * 1e9 + (double)(ended.tv_nsec - began.tv_nsec);
    printf("%.1f\n", count ? ns / (double)count : 0.0);
    return 0;
}
