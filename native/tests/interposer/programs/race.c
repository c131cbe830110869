/* Many threads look the driver up for the first time at once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 8 };
static pthread_barrier_t start;
static void *driver, *found[THREADS][4];

static void *look(void *at) {
    void **mine = at;
    int how;
    pthread_barrier_wait(&start);
    mine[0] = dlsym(driver, "cuLaunchKernel");
    mine[1] = dlsym(driver, "cuMemAlloc_v2");
    int (*get)(const char *, void **, int, unsigned long long, int *) =
        (int (*)(const char *, void **, int, unsigned long long, int *))dlsym(driver, "cuGetProcAddress_v2");
    get("cuLaunchKernel", &mine[2], 12000, 0, &how);
    get("cuMemcpyHtoD", &mine[3], 12000, 0, &how);
    int (*fill)(unsigned long long, unsigned char, size_t) =
        (int (*)(unsigned long long, unsigned char, size_t))dlsym(driver, "cuMemsetD8_v2");
    for (int i = 0; i < 100; i++) fill(0, 0, 1);
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    pthread_barrier_init(&start, NULL, THREADS);
    driver = dlopen("libcuda.so.1", RTLD_NOW); /* the loader's own locks are hidden from sanitizers */
    for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, look, found[i]);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    unsigned long long (*passed)(void) = (unsigned long long (*)(void))dlsym(RTLD_DEFAULT, "kiwi_preload_test_passed");
    for (int i = 1; i < THREADS; i++) {
        if (memcmp(found[i], found[0], sizeof found[0]) != 0) return printf("thread %d differs\n", i), 1;
    }
    printf("passed %llu\n", passed());
    return 0;
}
