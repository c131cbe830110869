/* To be preloaded: asks for huge pages for every large private mapping that a program, or a library in it, makes by
 * mmap(). Only huge_pages.py uses this. */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define HUGE_BYTES ((size_t)2 << 20)

void *mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset) {
    void *made = (void *)syscall(SYS_mmap, at, bytes, protection, flags, file, offset);
    if (made != MAP_FAILED && (flags & MAP_ANONYMOUS) && (flags & MAP_PRIVATE) && bytes >= HUGE_BYTES)
        madvise(made, bytes, MADV_HUGEPAGE);
    return made;
}

void *mmap64(void *at, size_t bytes, int protection, int flags, int file, off_t offset) {
    return mmap(at, bytes, protection, flags, file, offset);
}
