/* Preloaded: a system that has no more threads, from the call of no_more_threads() on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

static int none;
void no_more_threads(void) { none = 1; }

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    *(void **)&next = dlsym(RTLD_NEXT, "pthread_create");
    return none ? EAGAIN : next(thread, attributes, run, argument);
}
