/* Looks up driver functions in every way. Prints a line for each: its name, and whose function it got: kiwi, driver,
 * other or none. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef int get_proc_fn(const char *, void **, int, unsigned long long, int *);

static const char *whose(const void *address) {
    Dl_info info;
    if (!address) return "none";
    if (!dladdr(address, &info)) return "other";
    if (strstr(info.dli_fname, "libkiwi_preload")) return "kiwi";
    return strstr(info.dli_fname, "libcuda.so") ? "driver" : "other";
}

static void say(const char *what, const void *address) { printf("%s %s\n", what, whose(address)); }

int main(void) {
    /* No driver is loaded: a search must fail and set an error, as without Kiwi. */
    dlerror();
    say("default-before", dlsym(RTLD_DEFAULT, "cuLaunchKernel"));
    const char *error = dlerror();
    printf("error-before %s\n", error && strstr(error, "cuLaunchKernel") ? "told" : "not-told");
    void *program = dlopen(NULL, RTLD_LAZY);
    say("program-before", dlsym(program, "cuLaunchKernel"));
    dlerror();
    void *libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
    say("libc-no-such", dlsym(libc, "cuLaunchKernel"));
    error = dlerror();
    printf("libc-error %s\n", error && strstr(error, "cuLaunchKernel") ? "told" : "not-told");

    void *local = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *first = dlsym(local, "cuLaunchKernel");
    say("local", first);
    say("local-data-free", dlsym(local, "cuMemFree_v2"));
    say("local-never", dlsym(local, "cuDeviceGetCount"));
    say("local-wait", dlsym(local, "cuStreamSynchronize"));
    say("local-no-such", dlsym(local, "cuNoSuchFunction"));
    say("default-after", dlsym(RTLD_DEFAULT, "cuLaunchKernel"));
    say("libc", dlsym(RTLD_DEFAULT, "puts"));
    dlclose(local);
    dlclose(local); /* one too many, as some programs do */
    void *again = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    printf("again-same %s\n", dlsym(again, "cuLaunchKernel") == first ? "yes" : "no");
    dlclose(again);
    void *deep = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    say("deepbind", dlsym(deep, "cuLaunchKernel"));

    get_proc_fn *get_proc = (get_proc_fn *)dlsym(deep, "cuGetProcAddress_v2");
    say("get-proc", (void *)get_proc);
    void *found = NULL;
    int how = -1;
    get_proc("cuLaunchKernel", &found, 12000, 0, &how);
    say("proc-launch", found);
    get_proc("cuMemAlloc", &found, 12000, 0, &how);
    say("proc-alloc", found);
    get_proc("cuDeviceGetCount", &found, 12000, 0, &how);
    say("proc-never", found);
    get_proc("cuGetProcAddress", &found, 12000, 0, &how);
    printf("proc-proc-same %s\n", found == (void *)get_proc ? "yes" : "no");
    found = NULL;
    int result = get_proc("cuNoSuchFunction", &found, 12000, 0, &how);
    printf("proc-no-such %s %s\n", whose(found), result ? "error" : "success");
    return 0;
}
