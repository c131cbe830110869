/* What the environment says that the library should do in this process. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/kiwi_preload.h"

static int disabled; /* 0: not known yet, 1: no, 2: yes */

static bool is_set(const char *name, const char *value) {
    const char *found = getenv(name);
    return found && strcmp(found, value) == 0;
}

/* Returns whether KIWI_DISABLE is set, as everywhere in Kiwi to anything but 0, false and no. `kiwi run` also sets it,
 * but only for notebooks that its program may start: they belong to the program's session. */
static bool switched_off(void) {
    const char *set = getenv("KIWI_DISABLE");
    if (!set || !*set || getenv("KIWI_RUN_SESSION")) return false;
    return strcmp(set, "0") != 0 && strcasecmp(set, "false") != 0 && strcasecmp(set, "no") != 0;
}

bool kp_disabled(void) {
    int now = __atomic_load_n(&disabled, __ATOMIC_RELAXED);
    if (__builtin_expect(now == 0, 0)) {
        now = switched_off() ? 2 : 1;
        __atomic_store_n(&disabled, now, __ATOMIC_RELAXED);
    }
    return now == 2;
}

void kp_disable(void) { __atomic_store_n(&disabled, 2, __ATOMIC_RELAXED); }

/* A program that says "auto" asks for nothing: the daemon decides, and without one it owns nothing. */
bool kp_own_asked(void) {
#ifdef KP_GATE
    return is_set("KIWI_PRELOAD_OWN", "1");
#else
    return !is_set("KIWI_PRELOAD_OWN", "0") && !is_set("KIWI_PRELOAD_OWN", "auto");
#endif
}

static int decided; /* 0: not yet, 1: gate only, 2: owns */

bool kp_own_decide(bool own) {
    int before = 0, to = own ? 2 : 1;
    return __atomic_compare_exchange_n(&decided, &before, to, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) || before == to;
}

bool kp_own_decided(void) {
    if (!__atomic_load_n(&decided, __ATOMIC_ACQUIRE) && is_set("KIWI_PRELOAD_OWN", "0")) kp_own_decide(false);
    return __atomic_load_n(&decided, __ATOMIC_ACQUIRE) != 0;
}

bool kp_owning(void) { return __atomic_load_n(&decided, __ATOMIC_RELAXED) == 2 && !kp_disabled(); }
