/* Shared declarations of the link's parts: link.c (requests of the program's threads), protocol.c (messages sent
 * and received), agent.c (the pager thread: connecting, waiting, ending). */
#ifndef KP_AGENT_H
#define KP_AGENT_H

#include "link/wire.h"

/* ---- link.c, for the pager thread ---- */
bool kp_link_prepare(void); /* answers daemon.h from now on; false: the system lacks a resource */
void kp_link_forked(void);  /* called in a forked child, or if the link cannot begin: nobody answers any more */
int kp_link_wake_fd(void);
void kp_link_wake(void);
void kp_link_clear_wake(void); /* clears the wake-up, so that the thread can be woken again */
bool kp_link_take_lease(void); /* true: a thread wants a lease, and no earlier call reported it */
bool kp_link_take_no_lease(void); /* likewise, does not want it any more */
bool kp_link_take_context(void); /* likewise, of the context */
bool kp_link_take_books(void);
bool kp_link_take_room(uint64_t *request, uint64_t *bytes); /* gets the oldest request not yet sent */
bool kp_link_room_wanted(void); /* true: a thread waits for room */
void kp_link_answer_room(uint64_t request, bool granted);
void kp_link_set_connected(bool connected); /* pending requests for room are to be sent again */
void kp_link_end(void);                     /* the process exits: ends all waits for room */
bool kp_link_ended(void);

/* ---- protocol.c: the protocol on one connection ---- */
extern struct kp_wire kp_wire;
enum kp_reconnect { /* what the daemon's last message says about connecting again */
    KP_WELCOME_AGAIN,
    KP_REJECTED, /* the daemon refuses this process; a later daemon may accept it */
    KP_FULL,     /* the daemon has no place for this process now: the program waits for one, as others do */
    KP_REPLACED, /* another connection of this process took over: never connect again */
};
extern enum kp_reconnect kp_protocol_reconnect;

bool kp_protocol_begin(void);              /* queues the hello */
bool kp_protocol_welcomed(void);           /* true: the daemon has accepted this process */
bool kp_protocol_caught_up(void);          /* true: the daemon has also said how it wants the gate */
bool kp_protocol_receive(const char *line, size_t length);
bool kp_protocol_send_due(int64_t now_ns); /* queues the due messages; false: the daemon does not read or answer */
int64_t kp_protocol_due_ns(void);          /* when to call kp_protocol_send_due next; INT64_MAX: never */
void kp_protocol_disconnected(void);       /* called when the connection is gone */

#endif
