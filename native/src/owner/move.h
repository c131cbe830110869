/* Paging owned memory out of the GPU and in again. For the pager thread only, with the gate closed. */
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

/* Returns whether `rc` is a sticky error: the context returns it from every later call that starts or waits
 * for work, until its process ends. */
bool kp_move_sticky(CUresult rc);
/* Starts the thread that kp_move_settle needs. Returns false if the system has none to spare. */
bool kp_move_prepare(void);
/* Waits for the GPU. In a context with a sticky error nothing is under way. Refused: lock-timeout, driver. */
void kp_move_settle(int64_t until_ns, struct kp_outcome *outcome);
/* Pages everything out.
 * Lost: a sticky error has broken a context. Its memory is given back without a copy: no call can read it.
 * Refused: no-host-memory, driver. If all was in the GPU before, all is brought back; if even that fails
 * (kp_move_all_in tells), the gate must stay closed until kp_move_in succeeds. */
void kp_move_out(int64_t until_ns, struct kp_outcome *outcome);
/* Pages everything in.
 * Refused: no-room, driver. Nothing more is in the GPU than before, and the caller can try again. Lost: the
 * context is broken. */
void kp_move_in(int64_t until_ns, struct kp_outcome *outcome);
/* Copies memory ahead of a page-out; it stays in the GPU. Returns false if not all was copied: the gate is not armed or
 * was opened, the GPU works, no pinned memory is left, or `stop` says that something else is to do. With the gate
 * armed. */
bool kp_move_ahead(bool (*stop)(void));
void kp_move_forget_ahead(void); /* gives back the host memory of such copies */
bool kp_move_all_in(void); /* true: no owned memory is in host memory only */

#endif
