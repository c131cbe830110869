/* What the daemon's orders do: the state of this process as its pager. The pager thread only. */
#ifndef KP_PAGER_H
#define KP_PAGER_H

#include "message.h"
#include "move.h"

/* Performs `order`; `outcome` holds the texts that `done` points to. */
void kp_pager_do(const struct kp_message *order, struct kp_outcome *outcome, struct kp_done *done);

void kp_pager_gate(bool open);   /* the daemon's word: calls pass, or ask first */
/* The gate is shut and the driver may have the process: whether it has nobody here can ask without a call
 * that may crash. Only a daemon's order opens such a gate. So it is with each library that only is a gate,
 * and with one that owns memory since the daemon told it to yield. By any thread. */
bool kp_pager_stands(void);
void kp_pager_lost(void);        /* no daemon any more: whose memory is in the GPU runs on without, unless it stands */
void kp_pager_leave(void);       /* the process exits: nothing may wait for anything any more */
const char *kp_pager_state(void); /* "resident", "held", "out" */

#endif
