/* Performs the daemon's orders, and keeps the state of this process as its pager. For the pager thread only,
 * except where it is said. */
#ifndef KP_PAGER_H
#define KP_PAGER_H

#include "link/message.h"
#include "owner/move.h"

/* Performs `order`. `outcome` holds the texts that `done` points to. */
void kp_pager_do(const struct kp_message *order, struct kp_outcome *outcome, struct kp_done *done);

void kp_pager_gate(bool open);   /* by the daemon's message: calls pass, or ask for the lease first */
/* Copies memory ahead of a page-out while the gate is armed, if the daemon wants that, when kp_pager_ahead_due_ns has
 * come. `stop` says that something else is to do. */
void kp_pager_want_ahead(bool wanted);
int64_t kp_pager_ahead_due_ns(void);
void kp_pager_ahead(bool (*stop)(void));
/* Returns whether the gate is shut and the driver may have the process. The library cannot ask the driver
 * whether it has the process: that call may crash. Only an order of a daemon opens such a gate. This is the
 * case in a library that is only a gate, and in one that owns memory once the daemon has told it to yield.
 * May be called by any thread. */
bool kp_pager_yielded(void);
int64_t kp_pager_due_ns(void);   /* when kp_pager_look has something to do; INT64_MAX: never */
void kp_pager_look(int64_t now_ns); /* opens a gate that was kept closed between two orders, once its time is over */
/* Returns whether no call may pass: the memory is out, or the driver may have the process. May be called by any thread. */
bool kp_pager_away(void);
void kp_pager_lost(void);        /* the daemon is gone: a resident process runs on without it, unless it has yielded */
void kp_pager_leave(void);       /* the process exits: ends all waits */
const char *kp_pager_state(void); /* "resident", "held", "out" */

#endif
