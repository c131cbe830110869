/* A library with names of the driver of its own, and a program that uses it. Compiled with one of
 *   FUNCTIONS  functions that open libcuda at the first call: TensorFlow, implib.so, LLVM's dlwrap
 *   VARIABLES  pointers that are filled from libcuda: cuew, NVIDIA's dynlink_cuda
 * and without either for the program. DIRECT: the program uses the names itself, too. */
#include <dlfcn.h>
#include <stdio.h>

int own_gpus(void);

#if defined(FUNCTIONS)
static void *driver_function(const char *name) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    return driver ? dlsym(driver, name) : NULL;
}
#define FORWARD(name, params, args)                                                                  \
    int name params {                                                                                \
        int(*real) params = (int(*) params)driver_function(#name);                                   \
        return real ? real args : -1;                                                                \
    }
FORWARD(cuInit, (unsigned flags), (flags))
FORWARD(cuDeviceGetCount, (int *count), (count))
int own_gpus(void) {
    int count = 0, result = cuInit(0);
    return result ? -result : cuDeviceGetCount(&count) ? -1 : count;
}
#elif defined(VARIABLES)
int (*cuInit)(unsigned);
int (*cuDeviceGetCount)(int *);
int own_gpus(void) {
    if (cuInit || cuDeviceGetCount) return -20; /* somebody else's, or not empty at the start */
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) return -30;
    cuInit = (int (*)(unsigned))dlsym(driver, "cuInit");
    cuDeviceGetCount = (int (*)(int *))dlsym(driver, "cuDeviceGetCount");
    int count = 0, result = cuInit(0);
    return result ? -result : cuDeviceGetCount(&count) ? -1 : count;
}
#else
#if defined(DIRECT)
extern int (*cuInit)(unsigned);
extern int (*cuDeviceGetCount)(int *);
#endif
int main(int count, char **arguments) {
    int (*gpus)(void) = NULL;
    if (count > 1) { /* loaded later, as a Python module is */
        void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
        if (library) gpus = (int (*)(void))dlsym(library, "own_gpus");
    }
#if !defined(LATER)
    if (!gpus) gpus = own_gpus;
#endif
    printf("%d\n", gpus ? gpus() : -40);
#if defined(DIRECT)
    int again = 0;
    printf("%d %d\n", cuInit(0), cuDeviceGetCount(&again));
#endif
    return 0;
}
#endif
