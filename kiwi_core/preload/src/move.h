/* Moving what is owned out of the GPU and in again. The pager thread only, with the gate closed. */
#ifndef KP_MOVE_H
#define KP_MOVE_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

enum kp_what { KP_MOVED, KP_REFUSED, KP_LOST };

struct kp_outcome {
    enum kp_what what;
    const char *reason; /* of kiwi_core.states.Reason */
    char detail[256];
    uint64_t bytes;
    int64_t elapsed_ns;
};

/* Errors that a context answers from then on to every call that works, until its process ends. */
bool kp_move_sticky(CUresult rc);
/* Waits for the GPU.  Of a context with such an error nothing is under way any more.  Refused: lock-timeout, driver. */
void kp_move_settle(int64_t until_ns, struct kp_outcome *outcome);
/* Everything.
 * Lost: a context is broken by a sticky error.  Its memory is given back without a copy: no call can read it.
 * Refused: no-host-memory, driver.  Where all was in the GPU, all is brought back then; where even that
 * was refused (kp_move_all_in says so) the gate must stay closed until kp_move_in succeeds. */
void kp_move_out(int64_t until_ns, struct kp_outcome *outcome);
/* Brings everything in.
 * Refused: no-room, driver: nothing is in that was not, and it can be tried again.  Lost: the context
 * is broken. */
void kp_move_in(int64_t until_ns, struct kp_outcome *outcome);
bool kp_move_all_in(void); /* nothing that is owned is in host memory only */

#endif
