#define _GNU_SOURCE
#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NOT_OPENED (-2)
#define NONE (-1)

/* Returns the file that KIWI_PRELOAD_LOG names: "stderr", or a file that lines are appended to. */
static int log_file(void) {
    static int file = NOT_OPENED;
    int now = __atomic_load_n(&file, __ATOMIC_ACQUIRE);
    if (now != NOT_OPENED) return now;
    const char *name = getenv("KIWI_PRELOAD_LOG");
    if (!name || !*name) now = NONE;
    else if (strcmp(name, "stderr") == 0) now = STDERR_FILENO;
    else now = open(name, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    int expected = NOT_OPENED;
    if (!__atomic_compare_exchange_n(&file, &expected, now, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        if (now > STDERR_FILENO) close(now); /* another thread was faster */
        now = expected;
    }
    return now;
}

void kp_log(bool warning, const char *format, ...) {
    int before = errno, file = log_file();
    if (file == NONE && warning) file = STDERR_FILENO;
    if (file != NONE) {
        char line[1024];
        int head = snprintf(line, sizeof line, "kiwi[%d]: ", (int)getpid());
        va_list values;
        va_start(values, format);
        int length = vsnprintf(line + head, sizeof line - (size_t)head - 1, format, values);
        va_end(values);
        size_t all = (size_t)head + (size_t)(length < 0 ? 0 : length);
        if (all > sizeof line - 2) all = sizeof line - 2;
        line[all++] = '\n';
        ssize_t ignored = write(file, line, all);
        (void)ignored; /* there is nowhere to report the error */
    }
    errno = before;
}
