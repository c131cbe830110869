/* What the gate and the owner ask of the daemon, and tell it. The link does this; it is a room above them, which they do
 * not know (README.md). Where there is no link nobody answers: a request for the lease is not heard, and there is no
 * room. May be called by any thread. */
#ifndef KP_DAEMON_H
#define KP_DAEMON_H

#include <stdbool.h>
#include <stdint.h>

/* Requests the lease, or takes that back. Called by a thread that waits at the gate, any number of times. */
void kp_daemon_want_lease(bool wanted);

/* Requests only the context, which the driver may have. Called by a thread that waits in front of NVML, any number of
 * times. */
void kp_daemon_want_context(void);

/* Blocks the calling thread, which stands aside from the gate, until the daemon has made room (true:
 * try again) or there will be none: the daemon says so, `until_ns` is over, there is no daemon, or the process
 * exits. */
bool kp_daemon_want_room(uint64_t bytes, int64_t until_ns);

/* Notes that kp_own_books() has changed; cheap enough for each allocation. Locks nothing: it may be called under any
 * lock. */
void kp_daemon_books_changed(void);

/* ---- for the link ---- */

struct kp_daemon { /* the functions that do the above */
    void (*want_lease)(bool wanted);
    void (*want_context)(void);
    bool (*want_room)(uint64_t bytes, int64_t until_ns);
    void (*books_changed)(void);
};
/* Has `link`, which is never freed or changed, do all of the above from now on; NULL: nobody, as at first. */
void kp_daemon_through(const struct kp_daemon *link);

#endif
