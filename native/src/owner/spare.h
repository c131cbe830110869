/* A little GPU memory that stays free, because the driver needs some to take a process out of the GPU. */
#ifndef KP_SPARE_H
#define KP_SPARE_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>

/* Returns whether an allocation of `bytes` that has just succeeded left less than the spare memory free. The
 * caller then frees it again and returns that the GPU is full. For memory that the driver moves; inside the
 * gate. */
bool kp_spare_touched(size_t bytes);

#endif
