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

bool kp_owning(void) {
    static int own; /* the same values as in `disabled` */
    int now = __atomic_load_n(&own, __ATOMIC_RELAXED);
    if (__builtin_expect(now == 0, 0)) {
#ifdef KP_GATE
        now = is_set("KIWI_PRELOAD_OWN", "1") ? 2 : 1; /* on request only */
#else
        now = is_set("KIWI_PRELOAD_OWN", "0") ? 1 : 2;
#endif
        __atomic_store_n(&own, now, __ATOMIC_RELAXED);
    }
    return now == 2 && !kp_disabled();
}
