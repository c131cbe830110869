/* What every part of libkiwi_preload.so needs; docs/preload.md says how the parts fit. */
#ifndef KIWI_PRELOAD_H
#define KIWI_PRELOAD_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define KP_VERSION "0.1.0"

/* Everything is hidden but the driver's names, dlsym, what a program asks (pinning.c), and what tests call (where they are
 * built in). */
#define KP_API __attribute__((visibility("default")))

static inline int64_t kp_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Starts a thread that nobody waits for. Signals are for the program's own threads; a driver's calls run on its
 * stack, of which only what is touched takes memory. */
static inline bool kp_start_thread(void *(*run)(void *)) {
    sigset_t all, before;
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool good = !pthread_create(&thread, &attributes, run, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return good;
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
