/* Which wrapper stands for a function of the driver. */
#ifndef KP_WRAP_H
#define KP_WRAP_H

#include <stdint.h>

/* `real` was found in libcuda under its full name. Returns it, or what to call in its place. */
void *kp_wrapper_of_symbol(const char *name, void *real);
/* cuGetProcAddress(name, version, flags) returned `real`. */
void *kp_wrapper_of_call(const char *name, void *real, int version, uint64_t flags);
/* Functions handed out that Kiwi does not know: they pass by. */
unsigned kp_unknown_seen(void);

#endif
