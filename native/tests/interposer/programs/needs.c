/* A shared library that is linked with libcuda, as C++ extensions are. It returns which functions it found. */
#include <stddef.h>

int cuInit(unsigned flags);
int cuDriverGetVersion(int *version);

int needs_version(void) {
    int version = 0;
    return cuInit(0) == 0 && cuDriverGetVersion(&version) == 0 ? version : -1;
}
void *needs_init(void) { return (void *)cuInit; }
