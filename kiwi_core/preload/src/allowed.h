/* What the daemon allows this process beside what it needs (`pager-limits`): memory held beforehand,
 * copies kept, cleaning. The pager thread only, but for kp_limits_keep. */
#ifndef KP_ALLOWED_H
#define KP_ALLOWED_H

#include <stdbool.h>
#include <stdint.h>

void kp_limits_prepare(void); /* once, by a thread of the program: reads the environment */
void kp_limits_heard(int64_t arena_bytes, int64_t keep_bytes, bool clean); /* below 0: our own rule */
void kp_limits_own(void);  /* nobody has said anything: our own rule, and no cleaning */
void kp_limits_idle(void); /* nobody will page us out for a long time: what is only for speed goes */

uint64_t kp_limits_keep(void);    /* bytes of host copies that may be kept of what is in the GPU */
bool kp_limits_may_clean(void);
unsigned kp_limits_changes(void); /* times that anything of this changed */

#endif
