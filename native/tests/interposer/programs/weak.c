/* Asks whether the driver is linked, and calls it if so. */
#include <stdio.h>

int cuInit(unsigned) __attribute__((weak));
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                   void **, void **) __attribute__((weak));

int main(void) {
    if (!cuInit || !cuLaunchKernel) return puts("absent"), 0;
    printf("%d %d\n", cuInit(0), cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0));
    return 0;
}
