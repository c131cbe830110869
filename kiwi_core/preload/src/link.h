/* The link to the daemon, as the rest of the library sees it: what threads of the program ask for,
 * and the native thread that speaks for them. */
#ifndef KP_LINK_H
#define KP_LINK_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

/* Once, when the first context of a GPU exists: starts the thread, and gives it a moment to hear from
 * the daemon, so that the program's first call already finds the gate as the daemon wants it. */
void kp_link_start(const CUuuid *gpu);

/* By a thread that waits at the armed gate, any number of times. */
void kp_link_want_lease(void);

/* Blocks the calling thread, which stands aside from the gate, until the daemon has made room (true:
 * try again) or there will be none: it says so, `until_ns` is over, there is no daemon, or the process
 * exits. */
bool kp_link_want_room(uint64_t bytes, int64_t until_ns);

/* kp_own_books() has something new to say; cheap enough for each allocation. */
void kp_link_books_changed(void);


#endif
