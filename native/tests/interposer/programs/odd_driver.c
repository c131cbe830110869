/* A libcuda that does what a real one may do and the emulated one does not: it has addresses that only
 * cuGetProcAddress returns, functions and forms newer than Kiwi's header, calls of its own functions through their
 * exported names, and a dlsym from inside. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define API __attribute__((visibility("default")))
typedef unsigned long long pointer;
typedef uintptr_t W;

API W odd_seen[16]; /* arguments of the last call */
API int odd_calls;

API int cuInit(unsigned flags) { return flags ? 1 : 0; }
API int cuDriverGetVersion(int *version) { return *version = 99000, 0; }
API int cuCtxGetDevice(int *device) { return *device = 0, 0; }

static int saw(int count, const W *words) {
    odd_calls++;
    memcpy(odd_seen, words, (size_t)count * sizeof *words);
    return 0;
}

API int cuMemAlloc_v2(pointer *p, size_t bytes) { return odd_calls++, *p = 0x1000 + bytes, 0; }
API int odd_forbidden, odd_broken, odd_hold, odd_held; /* for gate.c, see below */
API int cuMemFree_v2(pointer p) {
    if (__atomic_load_n(&odd_forbidden, __ATOMIC_SEQ_CST)) __atomic_fetch_add(&odd_broken, 1, __ATOMIC_SEQ_CST);
    return (void)p, odd_calls++, 0;
}
API int cuTexRefSetMipmapLevelClamp(void *texture, float least, float most) {
    return (void)texture, odd_calls++, least == 0.25f && most == 8.5f ? 0 : 1;
}

/* Calls through the exported name, which the program or Kiwi may have interposed. */
API int cuMemcpyHtoDAsync_v2(pointer to, const void *from, size_t bytes, void *stream) {
    W words[] = {to, (W)from, bytes, (W)stream};
    return saw(4, words);
}
API int cuMemcpyHtoD_v2(pointer to, const void *from, size_t bytes) {
    return cuMemcpyHtoDAsync_v2(to, from, bytes, (void *)7);
}

API int cuLaunchKernel(W a, W b, W c, W d, W e, W f, W g, W h, W i, W j, W k) {
    W words[] = {a, b, c, d, e, f, g, h, i, j, k};
    return saw(11, words);
}
/* The same call, as cuGetProcAddress returns it. */
static int launch_inside(W a, W b, W c, W d, W e, W f, W g, W h, W i, W j, W k) {
    return 1000 + cuLaunchKernel(a, b, c, d, e, f, g, h, i, j, k);
}
static int alloc_inside(pointer *p, size_t bytes) { return cuMemAlloc_v2(p, bytes); }
/* A form with more arguments than any before. */
API int cuLaunchKernel_v9(W a, W b, W c, W d, W e, W f, W g, W h, W i, W j, W k, W l, W m, W n, W o, W p) {
    W words[] = {a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
    return saw(16, words);
}
API int cuBrandNewFunction(W a) {
    W words[] = {a};
    return saw(1, words);
}

API int cuProfilerStart(W a) {
    W words[] = {a};
    return saw(1, words);
}

/* For gate.c: a call that counts when it runs though it must not, and one that takes as long as it is told. */
API int cuMemsetD8_v2(pointer p, unsigned char value, size_t count) {
    (void)value;
    if (__atomic_load_n(&odd_forbidden, __ATOMIC_SEQ_CST)) __atomic_fetch_add(&odd_broken, 1, __ATOMIC_SEQ_CST);
    for (volatile size_t i = 0; i < count; i++) continue;
    if (p == 1) {
        __atomic_fetch_add(&odd_held, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&odd_hold, __ATOMIC_SEQ_CST)) nanosleep(&(struct timespec){0, 1000000}, NULL);
        __atomic_fetch_sub(&odd_held, 1, __ATOMIC_SEQ_CST);
    }
    if (__atomic_load_n(&odd_forbidden, __ATOMIC_SEQ_CST)) __atomic_fetch_add(&odd_broken, 1, __ATOMIC_SEQ_CST);
    return 0;
}
API int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { return *free_bytes = *total = 1 << 20, 0; }
static void look(void) {
    if (__atomic_load_n(&odd_forbidden, __ATOMIC_SEQ_CST)) __atomic_fetch_add(&odd_broken, 1, __ATOMIC_SEQ_CST);
}
API int cuStreamSynchronize(void *stream) {
    look();
    if (stream == (void *)1) {
        __atomic_fetch_add(&odd_held, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&odd_hold, __ATOMIC_SEQ_CST)) nanosleep(&(struct timespec){0, 1000000}, NULL);
        __atomic_fetch_sub(&odd_held, 1, __ATOMIC_SEQ_CST);
    }
    look();
    return 0;
}
API int cuCtxSetCurrent(void *context) { return (void)context, look(), 0; }
API int cuStreamQuery(void *stream) { return (void)stream, look(), 0; }

static int capturing; /* one state for all streams */
API int cuStreamBeginCapture_v2(void *stream, int mode) { return (void)mode, (void)stream, capturing = 1, 0; }
API int cuStreamIsCapturing(void *stream, int *status) { return (void)stream, *status = capturing, 0; }
API int cuStreamEndCapture(void *stream, void **graph) {
    if (stream == (void *)99) return 908; /* as from the wrong thread: the capture goes on */
    return *graph = NULL, capturing = 0, 0;
}
API int cuStreamDestroy_v2(void *stream) { return (void)stream, capturing = 0, 0; }

/* Returns what a look-up from inside the driver finds. */
API void *odd_inside(void) { return dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"); }

API int cuGetProcAddress_v2(const char *name, void **address, int version, unsigned long long flags, int *how) {
    static const struct {
        const char *name;
        void *old, *new;
    } table[] = {
        {"cuLaunchKernel", (void *)launch_inside, (void *)cuLaunchKernel_v9},
        {"cuMemAlloc", (void *)alloc_inside, (void *)alloc_inside},
        {"cuMemcpyHtoD", (void *)cuMemcpyHtoD_v2, (void *)cuMemcpyHtoD_v2},
        {"cuBrandNewFunction", (void *)cuBrandNewFunction, (void *)cuBrandNewFunction},
        {"cuProfilerStart", (void *)cuProfilerStart, (void *)cuProfilerStart},
    };
    (void)flags;
    *address = NULL;
    for (unsigned i = 0; i < sizeof table / sizeof *table; i++) {
        if (strcmp(table[i].name, name) == 0) *address = version >= 90000 ? table[i].new : table[i].old;
    }
    if (how) *how = !*address;
    return *address ? 0 : 500;
}
