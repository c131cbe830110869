/* RTLD_NEXT depends on the caller: two libraries define next_answer(), and the first one calls the next one.
 * Compiled three times: -DFIRST, -DSECOND, and the program. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int next_answer(void);

#ifdef FIRST
int next_answer(void) {
    int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, "next_answer");
    return next && next != next_answer ? next() + 1 : -1;
}
/* Also interposes the driver: a look-up of its own name finds the next definition, not this one. */
int cuDeviceGetCount(int *count) {
    int (*next)(int *) = (int (*)(int *))dlsym(RTLD_NEXT, "cuDeviceGetCount");
    return next && next != cuDeviceGetCount ? next(count) : -1;
}
#elif defined(SECOND)
int next_answer(void) { return 41; }
#else
int main(void) {
    printf("%d\n", next_answer());
    return next_answer() == 42 ? 0 : 1;
}
#endif
