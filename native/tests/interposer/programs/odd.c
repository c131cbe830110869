/* Prints what a program sees of odd_driver.c under the library, one line for each observation. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef uintptr_t W;
typedef int launch_fn(W, W, W, W, W, W, W, W, W, W, W);
typedef int wide_fn(W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W);
typedef int get_proc_fn(const char *, void **, int, unsigned long long, int *);

static const char *whose(const void *address) {
    Dl_info info;
    if (!address || !dladdr(address, &info)) return "none";
    if (strstr(info.dli_fname, "libkiwi_preload")) return "kiwi";
    return strstr(info.dli_fname, "libcuda.so") ? "driver" : "other";
}

static void *driver;
static W *seen;
static uint64_t (*passed)(void);
static get_proc_fn *get_proc;

static void *proc(const char *name, int version) {
    void *found = NULL;
    int how;
    get_proc(name, &found, version, 0, &how);
    return found;
}

static const char *words(int count) {
    for (int i = 0; i < count; i++) {
        if (seen[i] != (W)(100 + i)) return "wrong";
    }
    return "right";
}

int main(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    seen = dlsym(driver, "odd_seen");
    passed = (uint64_t(*)(void))dlsym(RTLD_DEFAULT, "kiwi_preload_test_passed");
    get_proc = (get_proc_fn *)dlsym(driver, "cuGetProcAddress_v2");

    launch_fn *launch = (launch_fn *)proc("cuLaunchKernel", 12000);
    uint64_t before = passed();
    int result = launch(100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110);
    printf("another-address %s %d %s %d\n", whose((void *)launch), result, words(11), (int)(passed() - before));
    printf("another-address-again %s\n", proc("cuLaunchKernel", 12010) == (void *)launch ? "same" : "differs");
    printf("by-name-differs %s\n", dlsym(driver, "cuLaunchKernel") == (void *)launch ? "same" : "differs");

    for (int i = 0; i < 16; i++) seen[i] = 0;
    wide_fn *wide = (wide_fn *)proc("cuLaunchKernel", 99000);
    before = passed();
    wide(100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115);
    printf("new-form %s %s %d\n", whose((void *)wide), words(16), (int)(passed() - before));
    void *by_name = dlsym(driver, "cuLaunchKernel_v9");
    printf("new-form-by-name %s\n", by_name == (void *)wide ? "same" : whose(by_name));

    printf("by-version %s\n", proc("cuMemAlloc", 12000) == dlsym(driver, "cuMemAlloc_v2") ? "same" : "differs");
    printf("newer-program %s\n", proc("cuMemAlloc", 99000) == dlsym(driver, "cuMemAlloc_v2") ? "same" : "differs");
    int (*new_call)(W) = (int (*)(W))proc("cuBrandNewFunction", 99000);
    printf("new-call %s %d %s\n", whose((void *)new_call), new_call(100), words(1));
    printf("new-call-by-name %s\n", whose(dlsym(driver, "cuBrandNewFunction")));

    int (*old_call)(W) = (int (*)(W))proc("cuProfilerStart", 12000);
    printf("old-elsewhere %s %d %s\n", whose((void *)old_call), old_call(100), words(1));
    int (*clamp)(void *, float, float) = (int (*)(void *, float, float))dlsym(driver, "cuTexRefSetMipmapLevelClamp");
    printf("floats %s %d\n", whose((void *)clamp), clamp(NULL, 0.25f, 8.5f));

    int (*copy)(unsigned long long, const void *, size_t) =
        (int (*)(unsigned long long, const void *, size_t))proc("cuMemcpyHtoD", 12000);
    before = passed();
    result = copy(100, (void *)101, 102);
    printf("through-exported-name %s %d %d\n", whose((void *)copy), result, (int)(passed() - before));
    void *(*inside)(void) = (void *(*)(void))dlsym(driver, "odd_inside");
    printf("inside %s\n", whose(inside()));
    return 0;
}
