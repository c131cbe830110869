/* Runs under the sanitizers: threads allocate, fill, check and free owned memory, while another thread pages all of it
 * out and in, with faults; at the end nothing is left over. */
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cuda.h>

#include "base/kiwi_preload.h"
#include "base/log.h"
#include "gate/gate.h"
#include "owner/arena.h"
#include "owner/blocks.h"
#include "owner/move.h"
#include "owner/own.h"
#include "owner/vmm.h"
#define KP_REAL_NAMES
#include "base/real.h"
#include "testing.h"

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

static void load_real(void) {
    void **member = (void **)&kp_real, *driver = dlopen("libcuda.so.1", RTLD_NOW);
    MUST(driver || dlsym(RTLD_DEFAULT, "cuInit"));
    for (size_t i = 0; i < sizeof kp_real_names / sizeof *kp_real_names; i++)
        member[i] = dlsym(driver ? driver : RTLD_DEFAULT, kp_real_names[i]);
}
bool kp_disabled(void) { return false; }
bool kp_owning(void) { return true; }
bool kp_own_decided(void) { return true; }
bool kp_own_asked(void) { return true; }
bool kp_own_decide(bool own) { return own; }
void kp_log(bool warning, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (warning) vfprintf(stderr, format, args), abort(); /* no warning is expected here */
    va_end(args);
}

enum { THREADS = 3, SLOTS = 8, OBJECTS = 3, MAPPERS = 2, STEP = 2 << 20, SECOND = 1000000000, MIB = 1 << 20 };
static int steps = 400;
static CUcontext context;
static CUfunction fill, sum;
static bool finished;
static unsigned refusals, moves, copies;

struct held {
    CUdeviceptr p;
    size_t bytes;
    uint32_t seed;
};

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

/* Returns what checksum_u64 gives for the words that xorshift_u32 writes. */
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

static void check_sum(struct held *h, CUdeviceptr result) {
    uint64_t words = h->bytes / 4, got = 0;
    void *params[] = {&h->p, &words, &result};
    CHECK(launch(sum, params));
    bool in = kp_gate_enter();
    CHECK(kp_real.cuMemcpyDtoH_v2(&got, result, sizeof got));
    kp_gate_leave(in);
    MUST(got == expected(words, h->seed));
}

static void check(struct held *h, CUdeviceptr result) {
    CUdeviceptr base = 0;
    size_t size = 0;
    check_sum(h, result);
    bool in = kp_gate_enter();
    CHECK(kp_own_range(&base, &size, h->p + h->bytes - 1));
    kp_gate_leave(in);
    MUST(base == h->p && size == h->bytes);
}

static void drop(struct held *h) {
    CHECK(kp_own_free(h->p)); /* a free is not gated */
    h->p = 0;
}

static void *work(void *arg) {
    uint32_t x = 12345u + 777u * (uint32_t)(uintptr_t)arg;
    struct held mine[SLOTS] = {{0}};
    struct held result;
    CHECK(kp_real.cuCtxSetCurrent(context));
    bool in = kp_gate_enter();
    CHECK(kp_own_alloc(&result.p, 8));
    kp_gate_leave(in);
    for (int i = 0; i < steps; i++) {
        struct held *h = &mine[rnd(&x) % SLOTS];
        if (!h->p) make(h, &x);
        else if (rnd(&x) % 3) check(h, result.p);
        else drop(h);
    }
    for (int i = 0; i < SLOTS; i++) {
        if (!mine[i].p) continue;
        check(&mine[i], result.p);
        drop(&mine[i]);
    }
    drop(&result);
    return NULL;
}

/* ---- the program's own virtual memory management ---- */

struct object {
    CUmemGenericAllocationHandle name; /* 0: there is none */
    size_t bytes;
    CUdeviceptr at[2]; /* 0: not mapped there */
    bool held;         /* the name is not released */
    struct held what;  /* its contents, at one of the addresses */
};

static const CUmemAccessDesc anywhere = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                                         .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

static void map_object(struct object *o, int i) {
    bool in = kp_gate_enter();
    CHECK(kp_real.cuMemAddressReserve(&o->at[i], o->bytes, 0, 0, 0));
    CHECK(kp_vmm_map(o->at[i], o->bytes, 0, o->name, 0));
    CHECK(kp_vmm_access(o->at[i], o->bytes, &anywhere, 1));
    kp_gate_leave(in);
}

static void unmap_object(struct object *o, int i) { /* frees are not gated */
    CHECK(kp_real.cuCtxSynchronize());
    CHECK(kp_vmm_unmap(o->at[i], o->bytes));
    CHECK(kp_vmm_address_free(o->at[i], o->bytes));
    o->at[i] = 0;
}

static bool make_object(struct object *o, uint32_t *x) {
    CUmemAllocationProp prop;
    memset(&prop, 0, sizeof prop);
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    MUST(kp_vmm_owns(&prop));
    o->bytes = (size_t)STEP * (1 + rnd(x) % 3);
    bool in = kp_gate_enter();
    CUresult rc = kp_vmm_create(&o->name, o->bytes, &prop, 0);
    kp_gate_leave(in);
    if (rc == CUDA_ERROR_OUT_OF_MEMORY) return false;
    CHECK(rc);
    o->held = true;
    map_object(o, 0);
    o->what = (struct held){.p = o->at[0], .bytes = o->bytes};
    write_it(&o->what, x);
    return true;
}

static void check_object(struct object *o, CUdeviceptr result, uint32_t *x) {
    CUmemAllocationProp prop;
    struct held h = o->what;
    for (int i = 0; i < 2; i++) {
        h.p = o->at[i];
        if (h.p && rnd(x) % 2) check_sum(&h, result);
    }
    if (o->held) CHECK(kp_vmm_properties(&prop, o->name)); /* passes a closed gate */
}

/* The pager closes the gate again and again, until all threads have ended. */
static void await_a_move(void) {
    while (!kp_gate_is_closed()) sched_yield();
}

static void end_object(struct object *o, uint32_t *x) {
    if (rnd(x) % 2) await_a_move();
    for (int i = 0; i < 2; i++)
        if (o->at[i]) unmap_object(o, i);
    if (o->held) CHECK(kp_vmm_release(o->name));
    *o = (struct object){0};
}

static void change_object(struct object *o, uint32_t *x) {
    int i = (int)(rnd(x) % 2);
    CUmemGenericAllocationHandle again;
    if (o->held && !o->at[i]) {
        map_object(o, i);
    } else if (o->at[i] && (o->held || o->at[!i])) {
        if (rnd(x) % 2) await_a_move();
        unmap_object(o, i);
    } else if (o->at[i]) {
        bool in = kp_gate_enter();
        CHECK(kp_vmm_retain(&again, (void *)(uintptr_t)(o->at[i] + 1000)));
        kp_gate_leave(in);
        MUST(again == o->name);
        o->held = true;
    }
    if (o->held && (o->at[0] || o->at[1]) && rnd(x) % 3 == 0) {
        CHECK(kp_vmm_release(o->name));
        o->held = false;
    }
}

static void *map_and_unmap(void *arg) {
    uint32_t x = 4242u + 77u * (uint32_t)(uintptr_t)arg;
    struct object mine[OBJECTS] = {{0}};
    struct held result;
    CHECK(kp_real.cuCtxSetCurrent(context));
    bool in = kp_gate_enter();
    CHECK(kp_own_alloc(&result.p, 8));
    kp_gate_leave(in);
    for (int i = 0; i < steps; i++) {
        struct object *o = &mine[rnd(&x) % OBJECTS];
        if (!o->name) {
            if (!make_object(o, &x)) *o = (struct object){0};
        } else if (rnd(&x) % 2) {
            check_object(o, result.p, &x);
        } else if (rnd(&x) % 4) {
            change_object(o, &x);
        } else {
            end_object(o, &x);
        }
    }
    for (int i = 0; i < OBJECTS; i++)
        if (mine[i].name) end_object(&mine[i], &x);
    drop(&result);
    return NULL;
}

/* ---- the pager ---- */

static bool now_and_then(void) {
    static unsigned asked;
    return ++asked % 7 == 0;
}

/* Takes the lease away or gives it back. Without it memory is copied ahead, more than once. */
static void lease(bool has, uint32_t *x) {
    struct kp_arena_books host;
    uint64_t epoch;
    kp_gate_arm(!has);
    if (has) kp_move_forget_ahead();
    for (int i = 0; !has && i < 100 && !kp_gate_is_still(&epoch); i++) usleep(100);
    for (uint32_t i = has ? 0 : 1 + rnd(x) % 3; i > 0; i--) kp_move_ahead(now_and_then);
    kp_arena_books(&host);
    copies += !has && host.used > 0;
}

static void *page(void *arg) {
    static const enum kp_fault kinds[] = {KP_FAULT_CREATE,   KP_FAULT_MAP,     KP_FAULT_UNMAP, KP_FAULT_COPY_OUT,
                                          KP_FAULT_COPY_IN, KP_FAULT_HOST,    KP_FAULT_ACCESS, KP_FAULT_PAGES};
    uint32_t x = 99;
    struct kp_outcome o;
    bool out = false;
    (void)arg;
    kp_gate_exempt();
    while (!__atomic_load_n(&finished, __ATOMIC_ACQUIRE) || out) {
        int64_t until = kp_now_ns() + 20ll * SECOND;
        bool faulty = rnd(&x) % 2;
        if (!out && rnd(&x) % 2) lease(kp_gate_is_armed(), &x);
        /* Where nothing may be held in advance, a page-out needs new memory, whose pages several threads fault in. */
        if (rnd(&x) % 3 == 0) kp_arena_allow(rnd(&x) % 2 ? 0 : UINT64_MAX);
        if (!out) {
            if (!kp_gate_close(until)) continue;
            kp_move_settle(until, &o);
            MUST(o.what == KP_MOVED);
        }
        enum kp_fault kind = kinds[rnd(&x) % (sizeof kinds / sizeof *kinds)]; /* set only now: allocations must succeed */
        if (faulty) kp_fault_set(kind, (int)(rnd(&x) % 6), 1 + (int)(rnd(&x) % 2));
        bool last = __atomic_load_n(&finished, __ATOMIC_ACQUIRE);
        if (!out || (!last && rnd(&x) % 6 == 0)) { /* also pages out again what a failed page-out has left in */
            kp_move_out(until, &o);
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
    lease(true, &x);
    return NULL;
}

/* Contexts are made and released meanwhile, outside of the gate: one that stays after its release, and one that ends with its
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
        usleep(20000);
        if (rc == CUDA_SUCCESS) CHECK(kp_own_free(p));
        if (other) CHECK(kp_own_context_destroy(other));
    }
    return NULL;
}

/* A context that stays is released again and again: whoever frees meanwhile must still wait for the GPU. */
static void *release_often(void *arg) {
    (void)arg;
    while (!__atomic_load_n(&finished, __ATOMIC_ACQUIRE)) {
        CUcontext again;
        CHECK(kp_real.cuDevicePrimaryCtxRetain(&again, 0));
        CHECK(kp_own_primary_release(0));
        sched_yield();
    }
    return NULL;
}

/* A thread that was cancelled inside the driver blocks no other thread. */
static void *never_leave(void *arg) {
    MUST(kp_gate_enter());
    return arg;
}

int main(int argc, char **argv) {
    pthread_t threads[THREADS], mappers[MAPPERS], pager, others[2], releasing;
    CUmodule module;
    if (argc > 1) steps = atoi(argv[1]);
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
    pthread_create(&pager, NULL, page, NULL);
    for (int i = 0; i < 2; i++) pthread_create(&others[i], NULL, come_and_go, NULL);
    pthread_create(&releasing, NULL, release_often, NULL);
    for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, (void *)i);
    for (uintptr_t i = 0; i < MAPPERS; i++) pthread_create(&mappers[i], NULL, map_and_unmap, (void *)i);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < MAPPERS; i++) pthread_join(mappers[i], NULL);
    __atomic_store_n(&finished, true, __ATOMIC_RELEASE);
    pthread_join(pager, NULL);
    for (int i = 0; i < 2; i++) pthread_join(others[i], NULL);
    pthread_join(releasing, NULL);
    CHECK(kp_own_free(first));
    const char *wrong = kp_own_check();
    if (wrong) fprintf(stderr, "the books are wrong: %s\n", wrong), abort();
    struct kp_books books;
    struct kp_arena_books host;
    kp_own_books(&books);
    kp_arena_books(&host);
    MUST(books.owned == 0 && books.resident == 0 && books.out == 0 && books.small_overhead == 0);
    MUST(host.used == 0);
    MUST(moves > 10 && refusals > 0);
    CHECK(kp_own_primary_release(0));
    printf("clean\n");
    fprintf(stderr, "%u moves, %u refusals, copied ahead %u times\n", moves, refusals, copies);
    return 0;
}
