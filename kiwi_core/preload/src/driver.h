/* The libcuda that this program uses, and where its functions are. */
#ifndef KP_DRIVER_H
#define KP_DRIVER_H

#include <stdbool.h>

/* The system's dlsym, not ours. NULL handle: the default search; RTLD_NEXT: what comes after us. */
void *kp_system_dlsym(void *handle, const char *name);
bool kp_system_dlsym_ready(void);

/* `address` is a function or data of libcuda. The first one seen is the one; from then on it stays
 * loaded and kp_real is filled. */
bool kp_in_driver(const void *address);
/* `address` belongs to libcuda or to a library that comes with it. */
bool kp_of_driver(const void *address);
bool kp_in_this_library(const void *address);
/* Looks for a libcuda that is loaded though nobody asked us for it. */
bool kp_driver_find(void);
/* A libcuda is loaded whose calls pass this library by. */
bool kp_driver_beside(void);

#endif
