/* What the emulated driver does not have: present under its name, and refuses.  Each definition here is
 * weak, so that the real one, where there is one, takes its place. */
#define API __attribute__((visibility("default")))

enum { NOT_SUPPORTED = 801 };

#define N(symbol, name, since)               \
    API __attribute__((weak)) int symbol(void); \
    int symbol(void) { return NOT_SUPPORTED; }
#include "names.def"
