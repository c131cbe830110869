/* The table of the driver's functions and their wrappers, which _generate.py writes (calls.c). */
#ifndef KP_CALLS_H
#define KP_CALLS_H

#include <stdint.h>

#include "base/kiwi_preload.h"
#include "gate/gate.h"
#include "gate/interrupt.h"
#include "hooks/symbols.h"

struct kp_symbol { /* one function that the driver exports, by its full name */
    const char *name;
    void *wrapper;
    void *real;    /* address in libcuda; filled when libcuda is found */
    int since;     /* hand-written wrapper: the version of the interface that first means this form; else 0 */
};

struct kp_slot_ { /* a wrapper that can stand for any address */
    void *wrapper;
    void *real; /* NULL: free */
};

struct kp_call { /* one function by its plain name, as a program passes it to cuGetProcAddress */
    const char *name;
    bool gated;
    uint16_t first, count;             /* its symbols */
    uint16_t first_spare, spare_count; /* its spare wrappers */
};

extern struct kp_symbol kp_symbols[];  /* grouped by call */
extern const struct kp_call kp_calls[]; /* in the order of names */
extern struct kp_slot_ kp_spares[], kp_wides[], kp_others[]; /* kp_others: for calls that are not gated */
extern struct kp_slot_ kp_nvmls[];                           /* for functions of NVML */

static inline void *kp_symbol_real(struct kp_symbol *symbol) {
    return __atomic_load_n(&symbol->real, __ATOMIC_RELAXED);
}

/* Return the call, or NULL if there is none of that name. The second strips the version and the
 * default-stream suffix. */
const struct kp_call *kp_call_named(const char *name);
const struct kp_call *kp_call_of_symbol(const char *symbol);
struct kp_symbol *kp_symbol_named(const char *symbol);

/* Returns the wrapper of a function (wrap.c); `real` was found in libcuda under its full name. */
void *kp_wrapper_of_symbol(const char *name, void *real);
/* Returns the wrapper of `real`, which cuGetProcAddress(name, version, flags) returned. */
void *kp_wrapper_of_call(const char *name, void *real, int version, uint64_t flags);

/* Returns the wrapper of a function of NVML; `real` itself: it needs none, or there is none left. */
void *kp_wrapper_of_nvml(const char *name, void *real);

/* Returns the driver's function, or NULL if there is none. For a wrapper that is called before its function
 * was looked up, by a program linked with libcuda. */
void *kp_real_of(int symbol);

/* ---- for the generated wrappers ---- */

typedef uintptr_t W; /* an argument or a result, whatever its type is */

#define NOT_FOREIGN (-1)
#define KP_REFUSABLE 4 /* an interrupt may end its wait */
#define KIND(class) ((class) & ~(uint32_t)KP_REFUSABLE)

W kp_no_such_call(void **slot); /* fills the slot if it can */
void kp_wrapped_foreign(int count);

/* This thread's call, for the slow wrapper. It is not passed as an argument, so that the fast wrapper can jump
 * to the slow one with all arguments in their places. */
extern __thread struct kp_slow {
    void **slot;
    int foreign;
    uint32_t class; /* KP_GATED or KP_OTHER, and perhaps KP_REFUSABLE */
} kp_slow __attribute__((tls_model("initial-exec")));

#define PASS(n, slot_, foreign_, class_)                                                             \
    void *real = __atomic_load_n(&slot_, __ATOMIC_RELAXED);                                          \
    struct kp_seat *seat = real ? kp_gate_step_in(KIND(class_)) : NULL;                             \
    if (__builtin_expect(!seat, 0)) {                                                                \
        kp_slow = (struct kp_slow){&slot_, foreign_, class_};                                        \
        return slow##n(P##n);                                                                        \
    }                                                                                                \
    W result = ((T##n)real)(P##n);                                                                   \
    kp_gate_step_out(seat);                                                                          \
    if (foreign_ >= 0 && (int)result == 0) kp_wrapped_foreign(foreign_);                             \
    return result;

#define PASS_NVML(n, slot_)                                                                          \
    void *real = __atomic_load_n(&slot_, __ATOMIC_RELAXED);                                          \
    kp_gate_enter_nvml();                                                                            \
    W result = ((T##n)real)(P##n);                                                                   \
    kp_gate_leave_nvml();                                                                            \
    return result;

static inline bool kp_enter_class(uint32_t class, bool *entered) {
    if (class & KP_REFUSABLE) return kp_gate_enter_refusable(KIND(class), entered);
    *entered = class == KP_GATED ? kp_gate_enter() : kp_gate_enter_other();
    return true;
}

/* For a function that is not yet looked up, a nested call, a thread's first call, or a gate that holds it up. */
#define SLOW(n)                                                                                      \
    struct kp_slow slow = kp_slow;                                                                   \
    void *real = __atomic_load_n(slow.slot, __ATOMIC_RELAXED);                                       \
    W failed = real ? 0 : kp_no_such_call(slow.slot);                                                \
    if (failed) return failed;                                                                       \
    real = __atomic_load_n(slow.slot, __ATOMIC_RELAXED);                                             \
    bool entered;                                                                                    \
    if (!kp_enter_class(slow.class, &entered)) return KP_INTERRUPTED;                                    \
    W result = ((T##n)real)(P##n);                                                                   \
    kp_gate_leave(entered);                                                                          \
    if (slow.foreign >= 0 && (int)result == 0) kp_wrapped_foreign(slow.foreign);                     \
    return result;

#endif
