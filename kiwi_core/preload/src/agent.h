/* What the parts of the link know of each other: link.c (the threads that want something), talk.c (what
 * is said and heard), agent.c (the thread: connecting, waiting, ending). */
#ifndef KP_AGENT_H
#define KP_AGENT_H

#include "wire.h"

/* ---- link.c, for the pager thread ---- */
bool kp_link_prepare(void); /* by kp_link_start; false: the system is out of something */
void kp_link_forked(void);  /* in a child */
int kp_link_wake_fd(void);
void kp_link_wake(void);
void kp_link_woken(void); /* and sees to it that it can be again */
bool kp_link_take_lease(void); /* somebody wants a lease, and had not been taken notice of */
bool kp_link_take_books(void);
bool kp_link_take_room(uint64_t *request, uint64_t *bytes); /* the oldest that was not asked for yet */
bool kp_link_room_wanted(void); /* somebody waits for room */
void kp_link_answer_room(uint64_t request, bool granted);
void kp_link_now_connected(bool connected); /* what waits for room is to be asked for anew */
void kp_link_end(void);                     /* the process exits: nobody waits for room any more */
bool kp_link_ended(void);

/* ---- talk.c: one connection, by the protocol ---- */
extern struct kp_wire kp_wire;
enum kp_regard { /* of the daemon, after its last words */
    KP_WELCOME_AGAIN,
    KP_REJECTED, /* it does not want this process; it may be another daemon later */
    KP_FULL,     /* it has no place for this process now: the program waits for one, as others do */
    KP_REPLACED, /* another connection of this process took over: never again */
};
extern enum kp_regard kp_talk_regard;

bool kp_talk_begin(void);     /* queues the hello */
bool kp_talk_welcomed(void);  /* the daemon knows us */
bool kp_talk_caught_up(void); /* and has said how it wants the gate */
bool kp_talk_heard(const char *line, size_t length);
bool kp_talk_say(int64_t now_ns); /* queues what is to be said now; false: the daemon takes nothing */
int64_t kp_talk_due_ns(void);     /* when to say something though nothing happens; INT64_MAX: never */
void kp_talk_over(void);          /* the connection is gone */

#endif
