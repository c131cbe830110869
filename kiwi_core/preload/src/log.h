/* What the library says. Safe in any thread, a signal handler included: one write(2) per line. */
#ifndef KP_LOG_H
#define KP_LOG_H

#include <stdbool.h>

/* What the user must know: on stderr (or in the log), once per process for each place that says it. */
#define kp_warn(...)                                                                                 \
    do {                                                                                             \
        static bool kp_said_;                                                                        \
        if (!__atomic_exchange_n(&kp_said_, true, __ATOMIC_RELAXED)) kp_say(true, __VA_ARGS__);      \
    } while (0)
/* For who looks into a problem: only where KIWI_PRELOAD_LOG asks for it. */
#define kp_note(...) kp_say(false, __VA_ARGS__)

void kp_say(bool warning, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
