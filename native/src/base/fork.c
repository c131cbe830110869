/* Children of this process. The driver does not survive a fork, and neither do our threads: a child must give up what
 * the library had before any other function of ours runs there. fork() says so by its handlers. _Fork() and clone()
 * run none: a page that is empty in every child (MADV_WIPEONFORK) tells that this is one. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/kiwi_preload.h"

#define WIPE_ON_FORK 18 /* MADV_WIPEONFORK, which old systems' headers lack */
enum { HANDLERS = 4 };

static void (*handlers[HANDLERS])(void);
static int count;
static uint32_t *original; /* 0 in a child; NULL: the kernel is older than 4.14 */
static pid_t process;

static void mark(void) {
    process = getpid();
    if (original) *original = 1;
}

static void in_child(void) {
    for (int i = 0; i < count; i++) handlers[i]();
    mark();
}

/* What pthread_atfork() calls in glibc. Weak: see musl in docs/preload.md. */
extern int __register_atfork(void (*before)(void), void (*parent)(void), void (*child)(void), void *library)
    __attribute__((weak));

static void prepare(void) {
    long size = sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page != MAP_FAILED && !madvise(page, (size_t)size, WIPE_ON_FORK)) original = page;
    else if (page != MAP_FAILED) munmap(page, (size_t)size);
    mark();
    if (__register_atfork) __register_atfork(NULL, NULL, in_child, NULL);
}

void kp_at_fork(void (*handler)(void)) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
    pthread_once(&once, prepare);
    pthread_mutex_lock(&mu);
    if (count < HANDLERS) {
        handlers[count] = handler;
        __atomic_store_n(&count, count + 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&mu);
}

void kp_check_fork(void) {
    if (!__atomic_load_n(&count, __ATOMIC_ACQUIRE)) return;
    if (original ? !*(volatile uint32_t *)original : process != getpid()) in_child();
}
