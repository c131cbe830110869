/* Passes on to the link. One pointer says who answers, so that a thread finds either nobody or the whole link. Its store
 * releases and each load acquires: what the link wrote before it began is there for every thread that calls it. */
#include "base/daemon.h"

#include <stddef.h>

static void no_lease(bool wanted) { (void)wanted; }
static void no_context(void) {}
static bool no_room(uint64_t bytes, int64_t until_ns) { return (void)bytes, (void)until_ns, false; }
static void no_books(void) {}

static const struct kp_daemon nobody = {no_lease, no_context, no_room, no_books};
static const struct kp_daemon *answering = &nobody; /* an atomic */

void kp_daemon_through(const struct kp_daemon *link) {
    __atomic_store_n(&answering, link ? link : &nobody, __ATOMIC_RELEASE);
}

static inline const struct kp_daemon *now(void) { return __atomic_load_n(&answering, __ATOMIC_ACQUIRE); }

void kp_daemon_want_lease(bool wanted) { now()->want_lease(wanted); }
void kp_daemon_want_context(void) { now()->want_context(); }
bool kp_daemon_want_room(uint64_t bytes, int64_t until_ns) { return now()->want_room(bytes, until_ns); }
void kp_daemon_books_changed(void) { now()->books_changed(); }
