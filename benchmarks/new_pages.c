/* new_pages WAY BYTES: maps new memory, gets its pages or copies into it as WAY says, and prints the seconds that took.
 *
 * WAY is a word for how, and "huge" or "small" for the pages:
 *   touch-…     one thread touches every page
 *   populate-…  one thread has the system put the pages there
 *   threads-…   the library's threads do
 *   copy-…      one thread copies into memory that nobody has touched
 *   ahead-…     one thread copies, chunk by chunk, behind the library's threads
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/kiwi_preload.h"
#include "owner/pieces.h"

#define CHUNK_BYTES ((size_t)64 << 20)

static void all_of(char *at, size_t bytes) { /* by the library's threads */
    if (!kp_pages_need(at, bytes, bytes)) exit(3);
    kp_pages_end();
}

static void copy_behind(char *at, const char *source, size_t bytes) {
    for (size_t done = 0; done < bytes; done += CHUNK_BYTES) {
        size_t n = bytes - done < CHUNK_BYTES ? bytes - done : CHUNK_BYTES;
        if (!kp_pages_need(at + done, n, bytes - done)) exit(3);
        memcpy(at + done, source, n);
    }
    kp_pages_end();
}

static void touch(volatile char *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 4096) at[i] = 0;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    const char *way = argv[1];
    size_t bytes = strtoull(argv[2], NULL, 10);
    char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *source = malloc(CHUNK_BYTES); /* stays in no cache, as a GPU's memory does not */
    if (at == MAP_FAILED || !source) return 3;
    memset(source, 7, CHUNK_BYTES);
    madvise(at, bytes, strstr(way, "-huge") ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    int64_t began_ns = kp_now_ns();
    if (!strncmp(way, "touch", 5)) touch(at, bytes);
    else if (!strncmp(way, "populate", 8)) {
        if (!kp_pages_fault_in(at, bytes)) return 3;
    } else if (!strncmp(way, "threads", 7)) all_of(at, bytes);
    else if (!strncmp(way, "ahead", 5)) copy_behind(at, source, bytes);
    else
        for (size_t done = 0; done < bytes; done += CHUNK_BYTES)
            memcpy(at + done, source, bytes - done < CHUNK_BYTES ? bytes - done : CHUNK_BYTES);
    printf("%.6f\n", (double)(kp_now_ns() - began_ns) / 1e9);
    return 0;
}
