/* Without a daemon: when to say so, and when to bring the memory back without one. The pager thread
 * only. */
#ifndef KP_ALONE_H
#define KP_ALONE_H

#include <stdint.h>

void kp_alone_prepare(void); /* once, by a thread of the program: reads the environment */
void kp_alone_since(int64_t now_ns); /* the connection was lost */
void kp_alone_over(void);            /* a daemon is there */
int64_t kp_alone_due_ns(void);       /* when kp_alone is to be called next; INT64_MAX: never */
void kp_alone(int64_t now_ns);       /* no daemon answers: does what is due */

int64_t kp_alone_silence_ns(void);   /* how long a daemon may leave unanswered whom it lets wait */

#endif
