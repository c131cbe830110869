/* Libraries that are linked with the driver. */
#ifndef KP_BIND_H
#define KP_BIND_H

#include <stdbool.h>

/* Marks code that runs for every look-up of any program, even a sanitizer's own before the sanitizer has started. */
#define EARLY __attribute__((no_sanitize("address", "thread", "undefined")))

/* Binds the libraries that were loaded since the last call to the wrappers. Called before the program's main(), and
 * at each of its look-ups; costs next to nothing if none was loaded. */
void kp_bind_new(void);
/* Returns whether the name is "cu" and a capital: cuDNN, cuBLAS and the runtime name theirs differently. */
bool kp_may_be_the_drivers(const char *name);

#endif
