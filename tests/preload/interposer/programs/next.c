/* RTLD_NEXT looks at who asks: two libraries each define next_answer(), and the first one's asks for
 * the next one's. Compiled three times: -DFIRST, -DSECOND, and the program. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int next_answer(void);

#ifdef FIRST
int next_answer(void) {
    int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, "next_answer");
    return next && next != next_answer ? next() + 1 : -1;
}
/* An interposer of the driver, too: its own name leads on to the next one, not back to it. */
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
