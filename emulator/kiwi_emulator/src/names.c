/* Functions that the emulated driver lacks: each exists under its name and refuses. The definitions here are
 * weak, so that an emulated function takes the place of its weak one. */
#define API __attribute__((visibility("default")))

enum { NOT_SUPPORTED = 801 };

#define N(symbol, name, since)               \
    API __attribute__((weak)) int symbol(void); \
    int symbol(void) { return NOT_SUPPORTED; }
#include "names.def"
