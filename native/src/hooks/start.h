/* The life of the library in this process. */
#ifndef KP_START_H
#define KP_START_H

/* Notes that the program is about to create a context; called outside of the driver. A context takes GPU memory, so the
 * library first learns from the daemon whether it is its turn, and who owns the memory that the program allocates. */
void kp_context_before_create(int device);
/* Notes that a context was created on this device; then, outside of the driver, kp_context_start_link starts the
 * link for the first one. */
void kp_context_created(int device);
void kp_context_start_link(void);
/* Notes a context of this thread that was created before the driver was found, by a library's constructor, and starts
 * the link for it. Called once, when libraries are bound to the wrappers. */
void kp_context_found(void);
/* Note that libcuda was found, and that cuInit succeeded. */
void kp_driver_used(void);
void kp_driver_initialised(void);

#endif
