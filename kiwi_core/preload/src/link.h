/* The link to the daemon, for the rest of the library: requests of the program's threads, and the start of
 * the native thread that passes them on. */
#ifndef KP_LINK_H
#define KP_LINK_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

/* Starts the thread and gives it a moment to hear from the daemon, so that the program's first call already
 * finds the gate as the daemon wants it. Acts once, for the first context. */
void kp_link_start(const CUuuid *gpu);

/* Requests the lease. Called by a thread that waits at the gate, any number of times. */
void kp_link_want_lease(void);

/* Blocks the calling thread, which stands aside from the gate, until the daemon has made room (true:
 * try again) or there will be none: the daemon says so, `until_ns` is over, there is no daemon, or the process
 * exits. */
bool kp_link_want_room(uint64_t bytes, int64_t until_ns);

/* Notes that kp_own_books() has changed; cheap enough for each allocation. */
void kp_link_books_changed(void);


#endif
