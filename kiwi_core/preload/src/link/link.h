/* The link to the daemon, for the rest of the library: the start of the native thread that speaks to it. The program's
 * threads reach it through daemon.h. */
#ifndef KP_LINK_H
#define KP_LINK_H

#include <cuda.h>

/* Starts the thread and gives it a moment to hear from the daemon, so that the program's first call already
 * finds the gate as the daemon wants it. Acts once, for the first context. */
void kp_link_start(const CUuuid *gpu);

#endif
