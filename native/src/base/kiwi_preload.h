/* Definitions for every part of libkiwi_preload.so; docs/preload.md says how the parts fit together. */
#ifndef KIWI_PRELOAD_H
#define KIWI_PRELOAD_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define KP_VERSION "0.1.0"

/* Marks an exported name. All names are hidden except dlsym, the functions that a program asks (pinning.c), those that
 * tests call (where they are built in), and, in the library under the driver's name only, the driver's (exports.map). */
#define KP_API __attribute__((visibility("default")))

static inline int64_t kp_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Starts a detached thread. The program's own threads handle all signals. Calls of the driver run on the
 * thread's stack, of which only the touched pages take memory. */
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

/* fork.c: has `handler` called in every child, before anything else of ours runs there. */
void kp_at_fork(void (*handler)(void));
/* Calls the handlers if this is a child that was made without them. Called where a program's call comes in, outside of
 * the gate. */
void kp_check_fork(void);

/* switches.c: what the library does in this process. */

/* Returns true if Kiwi does nothing here: KIWI_DISABLE=1, or a fork of a process that used the GPU. */
bool kp_disabled(void);
void kp_disable(void); /* in such a child; for good */
/* Returns true if the library owns the program's memory; false: it is only a gate, or nothing is decided yet. */
bool kp_owning(void);
/* Whether the library owns is decided once, before the program's first context: by the daemon, or by what the program
 * asked for where there is no daemon (docs/preload.md). The first decision stays. Returns whether it is this one. */
bool kp_own_decide(bool own);
bool kp_own_decided(void); /* with KIWI_PRELOAD_OWN=0 from the beginning */
bool kp_own_asked(void);   /* whether the program asked for it */

#endif
