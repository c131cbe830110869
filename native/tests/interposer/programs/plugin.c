/* A library that is linked with the driver, and a program that loads it later (PROGRAM). Each way in which a library
 * can refer to a function: a call, its address, and a table of addresses; and a look-up in what it was loaded with. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#ifdef PROGRAM
int main(int count, char **arguments) {
    int lazy = count > 2 && !strcmp(arguments[2], "lazy");
    void *library = dlopen(arguments[1], (lazy ? RTLD_LAZY : RTLD_NOW) | RTLD_LOCAL);
    void (*say)(void) = library ? (void (*)(void))dlsym(library, "say") : NULL;
    if (!say) return puts(dlerror()), 1;
    say();
    return 0;
}
#else
int cuInit(unsigned);
int cuMemAlloc_v2(unsigned long long *, size_t);
int cuLaunchKernel(void);
int cuMemFree_v2(unsigned long long);

static const char *whose(const void *address) {
    Dl_info info;
    if (!address || !dladdr(address, &info)) return "none";
    return strstr(info.dli_fname, "libkiwi_preload") ? "kiwi" : strstr(info.dli_fname, "libcuda.so") ? "driver" : "other";
}

static void *table[] = {(void *)cuLaunchKernel};
int early = -1;
static __attribute__((constructor)) void begin(void) { early = cuInit(0); }

void say(void) {
    int (*volatile address)(unsigned long long) = cuMemFree_v2;
    unsigned long long p = 0;
    printf("early %d\n", early);
    printf("address %s\n", whose((void *)address));
    printf("table %s\n", whose(*(void *volatile *)table));
    printf("default %s\n", whose(dlsym(RTLD_DEFAULT, "cuCtxGetCurrent")));
    printf("call %d\n", cuMemAlloc_v2(&p, 4096)); /* 201: there is no context */
}
#endif
