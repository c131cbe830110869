/* How fast this machine copies pinned memory: out, in, and both ways at once. */
#ifndef KP_SPEEDS_H
#define KP_SPEEDS_H

#include <stdbool.h>
#include <stdint.h>

struct kp_speeds {
    uint64_t out, in, both; /* bytes per second; both: the sum of the two ways */
};

/* The pager thread only, while the program idles: some milliseconds, and a little memory of the GPU for as
 * long.  False on any trouble, and as long as no pinned memory is there to copy from and to. */
bool kp_speeds_measure(struct kp_speeds *speeds);

#endif
