/* What every part of libkiwi_preload.so needs; docs/preload.md says how the parts fit. */
#ifndef KIWI_PRELOAD_H
#define KIWI_PRELOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define KP_VERSION "0.1.0"

/* Everything is hidden but the driver's names, dlsym, what a program asks (pinning.c), and what tests call. */
#define KP_API __attribute__((visibility("default")))

static inline int64_t kp_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* start.c: the life of the library in this process. */

/* True: Kiwi does nothing here: KIWI_DISABLE=1, or a fork of a process that used the GPU. */
bool kp_disabled(void);
/* False: gate only (KIWI_PRELOAD_OWN=0). */
bool kp_owning(void);
/* A context is about to be made, outside of the driver. It takes room in the GPU, so whoever owns no memory
 * hears before it whose turn it is. */
void kp_context_wanted(int device);
/* A context came to be on this device; then, outside of the driver: the link starts with the first one. */
void kp_context_seen(int device);
void kp_context_told(void);
/* libcuda was found; cuInit succeeded. */
void kp_driver_used(void);
void kp_driver_initialised(void);

#endif
