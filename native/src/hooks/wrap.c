/* Finds the wrapper for a name and an address of the driver. */

#include <string.h>

#include "base/log.h"
#include "base/real.h"
#include "gate/gate.h"
#include "hooks/calls.h"
#include "hooks/driver.h"

/* ---- by name ---- */

static const struct kp_call *search(const char *name, size_t length) {
    int low = 0, high = KP_CALLS - 1;
    while (low <= high) {
        int middle = (low + high) / 2;
        int order = strncmp(name, kp_calls[middle].name, length);
        if (order == 0 && kp_calls[middle].name[length]) order = -1;
        if (order == 0) return &kp_calls[middle];
        if (order < 0) high = middle - 1;
        else low = middle + 1;
    }
    return NULL;
}

const struct kp_call *kp_call_named(const char *name) { return search(name, strlen(name)); }

static size_t without(const char *name, size_t length, const char *suffix) {
    size_t n = strlen(suffix);
    return length > n && memcmp(name + length - n, suffix, n) == 0 ? length - n : length;
}

/* Strips the suffixes: cuMemcpyHtoD_v2_ptds -> cuMemcpyHtoD. */
const struct kp_call *kp_call_of_symbol(const char *symbol) {
    size_t length = strlen(symbol);
    length = without(symbol, length, "_ptsz");
    length = without(symbol, length, "_ptds");
    size_t digits = length;
    while (digits > 0 && symbol[digits - 1] >= '0' && symbol[digits - 1] <= '9') digits--;
    if (digits < length && digits > 2 && symbol[digits - 1] == 'v' && symbol[digits - 2] == '_')
        length = digits - 2;
    return search(symbol, length);
}

struct kp_symbol *kp_symbol_named(const char *symbol) {
    const struct kp_call *call = kp_call_of_symbol(symbol);
    for (int i = 0; call && i < call->count; i++) {
        if (strcmp(kp_symbols[call->first + i].name, symbol) == 0) return &kp_symbols[call->first + i];
    }
    return NULL;
}

/* ---- by address ---- */

/* Returns the wrapper in `slots` that stands for `real`, taking a free slot if none does yet; NULL: none is free. */
static void *slot_for(struct kp_slot_ *slots, int count, void *real) {
    for (int i = 0; i < count; i++) {
        void *there = NULL;
        if (__atomic_compare_exchange_n(&slots[i].real, &there, real, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) ||
            there == real)
            return slots[i].wrapper;
    }
    return NULL;
}

/* Returns whether the function is declared in cudaGL.h, cudaEGL.h, cudaVDPAU.h or cudaProfiler.h. */
static bool of_another_header(const char *name) {
    static const char *const begin[] = {"cuGL", "cuEGL", "cuVDPAU", "cuProfiler", "cuEventCreateFromEGL",
                                        "cuGraphicsGL", "cuGraphicsEGL", "cuGraphicsVDPAU",
                                        "cuGraphicsResourceGetMappedEgl"};
    for (size_t i = 0; i < sizeof begin / sizeof *begin; i++)
        if (!strncmp(name, begin[i], strlen(begin[i]))) return true;
    return false;
}

/* Returns a wrapper for a function that the header does not declare: a form of a known call, or (`call` is
 * NULL) a function that is new or from another header. Its arguments are unknown, too. */
static void *new_form(const struct kp_call *call, const char *name, void *real, int version) {
    bool gated = call && call->gated;
    void *wrapper = gated ? slot_for(kp_wides, KP_WIDES, real) : slot_for(kp_others, KP_OTHERS, real);
    bool is_new = call || !of_another_header(name);
    if (!wrapper || (is_new && !call)) kp_gate_is_leaky();
    if (!wrapper) {
        kp_note("%s (interface %d) bypasses the gate: there is no wrapper left for it", name, version);
        return real;
    }
    if (is_new)
        kp_note("%s (interface %d) is newer than this library: it is held %s", name, version,
                gated ? "at the closed gate" : "only while the gate is shut");
    return wrapper;
}

void *kp_wrapper_of_symbol(const char *name, void *real) {
    const struct kp_call *call = kp_call_of_symbol(name);
    struct kp_symbol *symbol = call ? kp_symbol_named(name) : NULL;
    return symbol ? symbol->wrapper : new_form(call, name, real, 0);
}

void *kp_wrapper_of_nvml(const char *name, void *real) {
    /* The first asks nobody; the second waits for events of the GPU, perhaps for ever. */
    if (!strcmp(name, "nvmlErrorString") || !strncmp(name, "nvmlEventSetWait", strlen("nvmlEventSetWait"))) return real;
    void *wrapper = slot_for(kp_nvmls, KP_NVMLS, real);
    return wrapper ? wrapper : real;
}

/* ---- by cuGetProcAddress ---- */

#define PER_THREAD_STREAM 2 /* CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM */

static bool per_thread(const char *symbol) {
    size_t length = strlen(symbol);
    return without(symbol, length, "_ptsz") < length || without(symbol, length, "_ptds") < length;
}

/* Returns the form with a hand-written wrapper that the name means in this version of the interface. */
static struct kp_symbol *by_hand(const struct kp_call *call, int version, uint64_t flags) {
    struct kp_symbol *best = NULL;
    for (int i = 0; i < call->count; i++) {
        struct kp_symbol *symbol = &kp_symbols[call->first + i];
        if (!symbol->since || symbol->since > version) continue;
        if (per_thread(symbol->name) && !(flags & PER_THREAD_STREAM)) continue;
        if (!best || symbol->since > best->since ||
            (symbol->since == best->since && per_thread(symbol->name)))
            best = symbol;
    }
    return best;
}

/* Returns whether a program of a newer CUDA gets the same function as the newest interface that we know. */
static bool form_is_known(const char *name, void *real, int version, uint64_t flags) {
    if (version <= KP_HEADER_VERSION) return true;
    void *ours = NULL;
    CUdriverProcAddressQueryResult how;
    return kp_real.cuGetProcAddress_v2 &&
           kp_real.cuGetProcAddress_v2(name, &ours, KP_HEADER_VERSION, flags, &how) == CUDA_SUCCESS &&
           ours == real;
}

void *kp_wrapper_of_call(const char *name, void *real, int version, uint64_t flags) {
    const struct kp_call *call = kp_call_named(name);
    if (!call) return new_form(call, name, real, version);
    for (int i = 0; i < call->count; i++) {
        struct kp_symbol *symbol = &kp_symbols[call->first + i];
        /* If the driver's own table uses its exported names, it has resolved ours. */
        if (real == symbol->wrapper || kp_symbol_real(symbol) == real) return symbol->wrapper;
    }
    if (!form_is_known(name, real, version, flags)) return new_form(call, name, real, version);
    struct kp_symbol *symbol = by_hand(call, version, flags);
    if (symbol) return symbol->wrapper;
    void *wrapper = slot_for(&kp_spares[call->first_spare], call->spare_count, real);
    return wrapper ? wrapper : new_form(call, name, real, version);
}
