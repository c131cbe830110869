/* What to do without a daemon: when to warn, and when to page the memory in. For the pager thread only. */
#ifndef KP_ALONE_H
#define KP_ALONE_H

#include <stdint.h>

void kp_alone_prepare(void); /* reads the environment; called once, by a thread of the program */
/* Reads a number from 1 to 86400 of `unit_ns` from the environment; else `ns` stays as it is. */
void kp_alone_read_setting(const char *name, int64_t unit_ns, int64_t *ns);
void kp_alone_begin(int64_t now_ns); /* called when the connection is lost */
void kp_alone_end(void);             /* called when a daemon is there */
int64_t kp_alone_due_ns(void);       /* when to call kp_alone next; INT64_MAX: never */
void kp_alone(int64_t now_ns);       /* does what is due while no daemon answers */

int64_t kp_alone_silence_ns(void);   /* how long a daemon may leave a waiting process without an answer */

#endif
