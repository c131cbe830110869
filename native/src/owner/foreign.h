/* Records of memory that Kiwi does not own: each allocation by its address or handle. */
#ifndef KP_FOREIGN_H
#define KP_FOREIGN_H

#include "owner/own.h"

void kp_foreign_added(enum kp_foreign kind, uint64_t key, uint64_t bytes);
bool kp_foreign_removed(enum kp_foreign kind, uint64_t key); /* false: the memory was never recorded */

/* Records an allocation that is left to the driver, in the current context. For calls inside the gate. */
void kp_driven_added(CUdeviceptr p, uint64_t bytes);
void kp_driven_removed(CUdeviceptr p);
void kp_driven_context_gone(CUcontext ctx); /* a context has taken its memory with it */

#endif
