/* A library whose constructor uses the GPU, before any code of the program runs, and (PROGRAM) a program that is linked
 * with it. */
#include <stdio.h>

int early_fill(void);

#ifdef PROGRAM
int main(void) {
    puts("begun");
    fflush(stdout);
    while (getchar() != EOF) printf("filled %d\n", early_fill()), fflush(stdout);
    return 0;
}
#else
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemsetD8_v2(unsigned long long, unsigned char, size_t);

static unsigned long long p;
static __attribute__((constructor)) void begin(void) {
    void *context;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return;
    cuMemAlloc_v2(&p, 4096);
}
int early_fill(void) { return cuMemsetD8_v2(p, 1, 4096); }
#endif
