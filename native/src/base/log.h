/* Messages to the user. Safe in any thread, and in a signal handler: one write(2) per line. */
#ifndef KP_LOG_H
#define KP_LOG_H

#include <stdbool.h>

/* Writes what the user must know to the log, or else to stderr: once per process for each place in the code. */
#define kp_warn(...)                                                                                 \
    do {                                                                                             \
        static bool kp_warned_;                                                                      \
        if (!__atomic_exchange_n(&kp_warned_, true, __ATOMIC_RELAXED)) kp_log(true, __VA_ARGS__);    \
    } while (0)
/* Writes details for investigating a problem, only if KIWI_PRELOAD_LOG is set. */
#define kp_note(...) kp_log(false, __VA_ARGS__)

void kp_log(bool warning, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
