/* A program that is linked with libcuda, as C programs are, and never calls dlsym for the driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef unsigned long long pointer;
int cuInit(unsigned);
int cuDeviceGet(int *, int);
int cuDevicePrimaryCtxRetain(void **, int);
int cuDevicePrimaryCtxRelease_v2(int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(pointer *, size_t);
int cuMemFree_v2(pointer);
int cuMemsetD32_v2(pointer, unsigned, size_t);
int cuMemcpyDtoH_v2(void *, pointer, size_t);
int cuCtxSynchronize(void);

#define CHECK(call)                                                                                  \
    do {                                                                                             \
        int result_ = call;                                                                          \
        if (result_) {                                                                               \
            printf("%s: %d\n", #call, result_);                                                      \
            return 1;                                                                                \
        }                                                                                            \
    } while (0)

int main(void) {
    uint64_t (*passed)(void) = (uint64_t(*)(void))dlsym(RTLD_DEFAULT, "kiwi_preload_test_passed");
    int device;
    void *context;
    pointer p;
    static unsigned back[1024];
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    uint64_t before = passed ? passed() : 0;
    CHECK(cuMemAlloc_v2(&p, sizeof back));
    CHECK(cuMemsetD32_v2(p, 0x5eed, 1024));
    CHECK(cuCtxSynchronize());
    CHECK(cuMemcpyDtoH_v2(back, p, sizeof back));
    CHECK(cuMemFree_v2(p));
    for (int i = 0; i < 1024; i++) {
        if (back[i] != 0x5eed) return printf("wrong bytes\n"), 1;
    }
    printf("passed %d\n", passed ? (int)(passed() - before) : -1);
    CHECK(cuDevicePrimaryCtxRelease_v2(device));
    return 0;
}
