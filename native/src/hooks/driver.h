/* The libcuda that this program uses, and the addresses of its functions. */
#ifndef KP_DRIVER_H
#define KP_DRIVER_H

#include <stdbool.h>

/* Calls the system's dlsym, not ours. A NULL handle is the default search; RTLD_NEXT is what comes after us. */
void *kp_system_dlsym(void *handle, const char *name);
bool kp_system_dlsym_ready(void);

/* Returns whether `address` is a function or data of libcuda. The first libcuda seen is the one that counts;
 * from then on it stays loaded and kp_real is filled. */
bool kp_in_driver(const void *address);
/* Returns whether `address` belongs to libcuda or to a library that comes with it. */
bool kp_in_driver_libraries(const void *address);
bool kp_in_this_library(const void *address);
/* Return whether the file is a libcuda, and whether it is one or comes with it, by its name. */
bool kp_is_a_driver(const char *path);
bool kp_is_the_drivers_library(const char *path);
/* Looks a name up in the library that the address belongs to, and in what that library was loaded with. */
void *kp_look_up_beside(const void *address, const char *name);
bool kp_same_library(const void *one, const void *other);
/* Returns whether `address` is a function of NVML, which stays loaded from then on: a driver of version 610 calls it at
 * a lock, also if the program has closed it (NVIDIA/cuda-checkpoint#58). */
bool kp_in_nvml(const void *address);
/* Returns whether kp_real is filled. */
bool kp_real_ready(void);
/* Looks for a libcuda that is loaded although no look-up of it came through this library. */
bool kp_driver_find(void);
/* Returns whether a libcuda is loaded whose calls bypass this library: a program can load one by its path. */
bool kp_driver_bypassed(void);

#endif
