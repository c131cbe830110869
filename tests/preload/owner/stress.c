/* Run under the sanitizers: threads allocate, fill, check and free memory that the library owns, while
 * another pages all of it out and in, with faults on the way; at the end nothing is left over.  What they
 * give up goes into a cache as a framework has one, and the pager is told that it is free. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cuda.h>

#include "arena.h"
#include "blocks.h"
#include "fault.h"
#include "gate.h"
#include "hash.h"
#include "kiwi_preload.h"
#include "log.h"
#include "move.h"
#include "own.h"
#define KP_REAL_NAMES
#include "real.h"

#define CHECK(call)                                                                                    \
    do {                                                                                               \
        CUresult rc_ = (call);                                                                         \
        if (rc_) fprintf(stderr, "%s:%d: %s = %d\n", __FILE__, __LINE__, #call, (int)rc_), abort();    \
    } while (0)
#define MUST(what)                                                                                     \
    do {                                                                                               \
        if (!(what)) fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what), abort();       \
    } while (0)

/* ---- in place of the rest of the library ---- */

struct kp_real kp_real;
static void load_real(void) {
    void **member = (void **)&kp_real, *driver = dlopen("libcuda.so.1", RTLD_NOW);
    MUST(driver || dlsym(RTLD_DEFAULT, "cuInit"));
    for (size_t i = 0; i < sizeof kp_real_names / sizeof *kp_real_names; i++)
        member[i] = dlsym(driver ? driver : RTLD_DEFAULT, kp_real_names[i]);
}
bool kp_disabled(void) { return false; }
bool kp_owning(void) { return true; }
void kp_link_want_lease(void) {}
void kp_link_books_changed(void) {}
bool kp_link_want_room(uint64_t bytes, int64_t until_ns) { return (void)bytes, (void)until_ns, false; }
void kp_say(bool warning, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (warning) vfprintf(stderr, format, args), abort(); /* nothing here is to be warned of */
    va_end(args);
}

uint64_t kiwi_preload_passed(void);
int kiwi_preload_free_ranges(uint64_t, size_t, const uint64_t *, const uint64_t *);

enum { THREADS = 3, SLOTS = 8, CACHED = 6, SECOND = 1000000000, MIB = 1 << 20 };
static int steps = 400;
static CUcontext context;
static CUfunction fill, sum;
static bool finished;
static unsigned refusals, moves;

struct held {
    CUdeviceptr p;
    size_t bytes;
    uint32_t seed;
};

/* Allocated, and free: whoever takes one out fills it before reading it. */
static pthread_mutex_t cache_mu = PTHREAD_MUTEX_INITIALIZER;
static struct held cache[CACHED];

static bool put_away(struct held *h) {
    pthread_mutex_lock(&cache_mu);
    int i = 0;
    while (i < CACHED && cache[i].p) i++;
    bool good = i < CACHED;
    if (good) cache[i] = *h;
    pthread_mutex_unlock(&cache_mu);
    return good;
}

static bool take_out(struct held *h) {
    pthread_mutex_lock(&cache_mu);
    int i = 0;
    while (i < CACHED && !cache[i].p) i++;
    bool good = i < CACHED;
    if (good) *h = cache[i], cache[i].p = 0;
    pthread_mutex_unlock(&cache_mu);
    return good;
}

static void say_what_is_free(void) {
    uint64_t passed = kiwi_preload_passed(), at[CACHED], bytes[CACHED];
    size_t n = 0;
    pthread_mutex_lock(&cache_mu);
    for (int i = 0; i < CACHED; i++) {
        if (cache[i].p) at[n] = cache[i].p, bytes[n++] = cache[i].bytes;
    }
    pthread_mutex_unlock(&cache_mu);
    kiwi_preload_free_ranges(passed, n, at, bytes);
}

static uint32_t rnd(uint32_t *x) {
    *x ^= *x << 13;
    *x ^= *x >> 17;
    *x ^= *x << 5;
    return *x;
}

static CUresult launch(CUfunction f, void **params) {
    bool in = kp_gate_enter();
    CUresult rc = kp_real.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL);
    kp_gate_leave(in);
    return rc;
}

/* What xorshift_u32 writes, and checksum_u64 says of it. */
static uint64_t expected(uint64_t words, uint32_t seed) {
    uint64_t total = 0;
    for (uint64_t i = 0; i < words; i++) {
        uint32_t v = seed ^ (uint32_t)(i * 2654435761u);
        v ^= v << 13;
        v ^= v >> 17;
        v ^= v << 5;
        total += (uint64_t)v * (i + 1);
    }
    return total;
}

static void write_it(struct held *h, uint32_t *x) {
    h->seed = rnd(x) | 1;
    uint64_t words = h->bytes / 4;
    void *params[] = {&h->p, &words, &h->seed};
    CHECK(launch(fill, params));
}

static void make(struct held *h, uint32_t *x) {
    static const size_t scales[] = {64, 4096, 40000, 300000, 1500000, 5000000};
    size_t bytes = (rnd(x) % scales[rnd(x) % 6] + 4) / 4 * 4;
    if (rnd(x) % 3 == 0 && take_out(h)) {
        write_it(h, x);
        return;
    }
    bool in = kp_gate_enter();
    CUresult rc = kp_own_alloc(&h->p, bytes);
    kp_gate_leave(in);
    if (rc == CUDA_ERROR_OUT_OF_MEMORY) {
        h->p = 0;
        return;
    }
    CHECK(rc);
    MUST(h->p % 512 == 0);
    h->bytes = bytes;
    write_it(h, x);
}

static void check(struct held *h, CUdeviceptr result) {
    uint64_t words = h->bytes / 4, got = 0;
    void *params[] = {&h->p, &words, &result};
    CUdeviceptr base = 0;
    size_t size = 0;
    CHECK(launch(sum, params));
    bool in = kp_gate_enter();
    CHECK(kp_real.cuMemcpyDtoH_v2(&got, result, sizeof got));
    CHECK(kp_own_range(&base, &size, h->p + h->bytes - 1));
    kp_gate_leave(in);
    MUST(base == h->p && size == h->bytes);
    MUST(got == expected(words, h->seed));
}

static void drop(struct held *h, bool for_good) {
    if (for_good || h->bytes < KP_LEAF_BYTES || !put_away(h)) CHECK(kp_own_free(h->p)); /* not through the gate */
    h->p = 0;
}

/* Whether a hint still holds when memory goes out is chance: some more steps where none has yet. */
static bool enough(int done) {
    struct kp_move_books moved;
    if (done < steps) return false;
    kp_move_books(&moved);
    return moved.unused || done >= 20 * steps;
}

static void *work(void *arg) {
    uint32_t x = 12345u + 777u * (uint32_t)(uintptr_t)arg;
    struct held mine[SLOTS] = {{0}};
    struct held result;
    CHECK(kp_real.cuCtxSetCurrent(context));
    bool in = kp_gate_enter();
    CHECK(kp_own_alloc(&result.p, 8));
    kp_gate_leave(in);
    for (int i = 0; !enough(i); i++) {
        struct held *h = &mine[rnd(&x) % SLOTS];
        if (!h->p) make(h, &x);
        else if (rnd(&x) % 3) check(h, result.p);
        else drop(h, false);
    }
    for (int i = 0; i < SLOTS; i++) {
        if (!mine[i].p) continue;
        check(&mine[i], result.p);
        drop(&mine[i], true);
    }
    drop(&result, true);
    return NULL;
}

static void *page(void *arg) {
    static const enum kp_fault kinds[] = {KP_FAULT_CREATE, KP_FAULT_MAP,  KP_FAULT_UNMAP,
                                          KP_FAULT_COPY_OUT, KP_FAULT_COPY_IN, KP_FAULT_HOST};
    uint32_t x = 99;
    struct kp_outcome o;
    bool out = false;
    (void)arg;
    kp_gate_exempt();
    while (!__atomic_load_n(&finished, __ATOMIC_ACQUIRE) || out) {
        int64_t until = kp_now_ns() + 20ll * SECOND;
        bool faulty = rnd(&x) % 2;
        if (!out) {
            say_what_is_free();
            if (!kp_gate_close(until)) continue;
            kp_move_settle(until, &o);
            MUST(o.what == KP_MOVED);
        }
        enum kp_fault kind = kinds[rnd(&x) % 6]; /* set only now: allocations are to succeed */
        if (faulty) kp_fault_set(kind, (int)(rnd(&x) % 6), 1 + (int)(rnd(&x) % 2));
        bool last = __atomic_load_n(&finished, __ATOMIC_ACQUIRE);
        uint64_t part = !last && rnd(&x) % 2 ? (uint64_t)(1 + rnd(&x) % 16) * MIB : 0;
        if (!out && rnd(&x) % 4 == 0) {
            kp_move_clean(8 * MIB, until, &o);
        } else if (!out || (part && rnd(&x) % 3 == 0)) {
            kp_move_out(part, until, &o);
            out = out || o.what == KP_MOVED || !kp_move_all_in();
        } else {
            kp_move_in(until, &o);
            if (o.what == KP_MOVED) out = false;
        }
        kp_fault_set(kind, 0, 0);
        MUST(o.what != KP_LOST);
        if (o.what == KP_REFUSED) refusals++;
        else moves++;
        if (!out) kp_gate_open();
        usleep(1000);
    }
    return NULL;
}

/* Contexts come and go meanwhile, and not through the gate: one that is given back and stays, and one that ends with its
 * memory. */
static void *come_and_go(void *arg) {
    (void)arg;
    CUresult (*create)(CUcontext *, unsigned, CUdevice) = dlsym(RTLD_DEFAULT, "cuCtxCreate_v2");
    while (!__atomic_load_n(&finished, __ATOMIC_ACQUIRE)) {
        CUcontext again, other = NULL;
        CUdeviceptr p;
        CHECK(kp_real.cuDevicePrimaryCtxRetain(&again, 0));
        CHECK(kp_own_primary_release(0));
        bool in = kp_gate_enter();
        CUresult rc = create(&other, 0, 0);
        for (int i = 0; i < 4 && rc == CUDA_SUCCESS; i++) rc = kp_own_alloc(&p, 40000 << i);
        kp_gate_leave(in);
        MUST(rc == CUDA_SUCCESS || rc == CUDA_ERROR_OUT_OF_MEMORY);
        usleep(20000); /* the end of a context ends what was said to be free */
        if (rc == CUDA_SUCCESS) CHECK(kp_own_free(p));
        if (other) CHECK(kp_own_context_destroy(other));
    }
    return NULL;
}

/* Nobody is left: what is said to be free now is not copied. */
static void move_with_something_free(void) {
    struct kp_outcome o;
    struct held h = {.bytes = 3 * KP_LEAF_BYTES};
    int64_t until = kp_now_ns() + 60ll * SECOND;
    CHECK(kp_own_alloc(&h.p, h.bytes));
    while (!put_away(&h)) {
        struct held other;
        MUST(take_out(&other));
        drop(&other, true);
    }
    say_what_is_free();
    MUST(kp_gate_close(until));
    kp_move_settle(until, &o);
    MUST(o.what == KP_MOVED);
    kp_move_out(0, until, &o);
    MUST(o.what == KP_MOVED);
    kp_move_in(until, &o);
    MUST(o.what == KP_MOVED);
    kp_gate_open();
}

/* One that was cancelled inside the driver stands in nobody's way. */
static void *never_leave(void *arg) {
    MUST(kp_gate_enter());
    return arg;
}

int main(int argc, char **argv) {
    pthread_t threads[THREADS], pager, others[2];
    CUmodule module;
    if (argc > 1) steps = atoi(argv[1]);
    setenv("KIWI_VERIFY", "1", 1);
    load_real();
    CHECK(kp_real.cuInit(0));
    CHECK(kp_real.cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(kp_real.cuCtxSetCurrent(context));
    CHECK(kp_real.cuModuleLoadData(&module, "kiwi-emulated-module"));
    CHECK(kp_real.cuModuleGetFunction(&fill, module, "xorshift_u32"));
    CHECK(kp_real.cuModuleGetFunction(&sum, module, "checksum_u64"));
    kp_gate_prepare();
    pthread_create(&pager, NULL, never_leave, NULL);
    pthread_join(pager, NULL);
    MUST(kp_gate_close(kp_now_ns() + 20ll * SECOND));
    kp_gate_open();
    kp_own_start(0);
    CUdeviceptr first;
    CHECK(kp_own_alloc(&first, 100));
    kp_arena_enable(true);
    for (int i = 0; i < 6000 && !kp_hash_ready_everywhere(); i++) usleep(10000);
    MUST(kp_hash_ready_everywhere());
    pthread_create(&pager, NULL, page, NULL);
    for (int i = 0; i < 2; i++) pthread_create(&others[i], NULL, come_and_go, NULL);
    for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, (void *)i);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    __atomic_store_n(&finished, true, __ATOMIC_RELEASE);
    pthread_join(pager, NULL);
    for (int i = 0; i < 2; i++) pthread_join(others[i], NULL);
    CHECK(kp_own_free(first));
    move_with_something_free();
    for (struct held h; take_out(&h);) drop(&h, true);
    const char *wrong = kp_own_check();
    if (wrong) fprintf(stderr, "the books are wrong: %s\n", wrong), abort();
    struct kp_books books;
    struct kp_arena_books host;
    kp_own_books(&books);
    kp_arena_books(&host);
    MUST(books.owned == 0 && books.resident == 0 && books.out == 0 && books.small_overhead == 0);
    MUST(host.used == 0);
    struct kp_move_books moved;
    kp_move_books(&moved);
    MUST(moves > 10 && refusals > 0);
    MUST(moved.copied && moved.skipped && moved.verified);
    MUST(moved.unused);
    MUST(!moved.differed);
    CHECK(kp_own_primary_release(0));
    printf("clean\n");
    fprintf(stderr, "%u moves, %u refusals\n", moves, refusals);
    return 0;
}
