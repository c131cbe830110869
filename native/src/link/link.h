/* The link to the daemon, for the rest of the library: the start of the native thread that speaks to it. The program's
 * threads reach it through daemon.h. */
#ifndef KP_LINK_H
#define KP_LINK_H

#include <cuda.h>

/* Starts the thread. Acts once, for the first context. */
void kp_link_start(const CUuuid *gpu);
/* Gives the thread a moment to hear from the daemon, so that the program's first call already finds the gate as the
 * daemon wants it, and it is decided who owns the program's memory. Where the daemon is there, and has not answered by
 * then, the library is only the gate. */
void kp_link_await(void);

#endif
