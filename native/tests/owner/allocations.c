/* allocations SIZE COUNT: makes COUNT allocations and frees them, through dlsym as programs do. Under callgrind, the
 * difference between two counts gives the instructions of one allocation and one free. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static void must(int result) {
    if (result) printf("the driver says %d\n", result), exit(1);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    size_t size = strtoull(argv[1], NULL, 0), count = strtoull(argv[2], NULL, 0);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    if (!driver) return 3;
#define GET(name, ...) int (*name)(__VA_ARGS__) = (int (*)(__VA_ARGS__))dlsym(driver, #name)
    GET(cuInit, unsigned);
    GET(cuDevicePrimaryCtxRetain, void **, int);
    GET(cuCtxSetCurrent, void *);
    GET(cuMemAlloc_v2, unsigned long long *, size_t);
    GET(cuMemFree_v2, unsigned long long);
    unsigned long long *held = calloc(count, sizeof *held);
    must(cuInit(0));
    must(cuDevicePrimaryCtxRetain(&context, 0));
    must(cuCtxSetCurrent(context));
    for (size_t i = 0; i < count; i++) must(cuMemAlloc_v2(&held[i], size));
    for (size_t i = 0; i < count; i++) must(cuMemFree_v2(held[i]));
    free(held);
    return 0;
}
