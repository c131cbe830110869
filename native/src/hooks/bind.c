/* Binds libraries that are linked with the driver to the wrappers. Only the preloaded library does this.
 *
 * This library exports none of the driver's names. If it did, the loader would find them before a program's own:
 * TensorFlow has functions of such names that load the driver at their first call, other programs have variables
 * of such names, into which they write what dlsym returned. So the loader binds every name as it does without
 * Kiwi. What it has bound to the driver, and nothing else, is then bound to the wrapper instead: the words of each
 * library that hold an address of the driver. That happens before main(), for what the program is linked with, and
 * at the first dlsym after a dlopen, for what was loaded later.
 *
 * The libraries are read under the loader's lock (dl_iterate_phdr). No other function of the loader may be called
 * there: dlopen takes the same two locks in the opposite order.
 */
#define _GNU_SOURCE
#include "hooks/bind.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hooks/hooks.h"

#include "base/log.h"
#include "hooks/calls.h"
#include "hooks/driver.h"
#include "hooks/start.h"

#ifndef KP_GATE

#if defined(__x86_64__)
enum { WORD = R_X86_64_64, DATA = R_X86_64_GLOB_DAT, JUMP = R_X86_64_JUMP_SLOT };
#elif defined(__aarch64__)
enum { WORD = R_AARCH64_ABS64, DATA = R_AARCH64_GLOB_DAT, JUMP = R_AARCH64_JUMP_SLOT };
#endif

#pragma weak dladdr1

static struct {
    unsigned long long adds, subs; /* the loader's counts of libraries when we last looked */
    uintptr_t *done;               /* the libraries that were bound, by the address of their dynamic section */
    size_t count, room;
} seen;
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; /* guards `seen` */
static bool started; /* atomic: the program's libraries are loaded and initialised */

/* ---- one library ---- */

struct library {
    const struct dl_phdr_info *info;
    const ElfW(Dyn) *dynamic;
    uintptr_t begin, end;             /* of its segments */
    uintptr_t relro_begin, relro_end; /* read-only since the loader has bound it */
    const ElfW(Sym) *symbols;
    const char *names;
};

static struct library library(const struct dl_phdr_info *info) {
    struct library found = {.info = info, .begin = UINTPTR_MAX};
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        uintptr_t at = info->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_DYNAMIC) found.dynamic = (const void *)at;
        if (part->p_type == PT_LOAD && at < found.begin) found.begin = at;
        if (part->p_type == PT_LOAD && at + part->p_memsz > found.end) found.end = at + part->p_memsz;
        if (part->p_type == PT_GNU_RELRO) found.relro_begin = at, found.relro_end = at + part->p_memsz;
    }
    return found;
}

/* Returns an address from the dynamic section, where the loader has put its own base in most libraries. */
static const void *pointer(const struct library *lib, ElfW(Sxword) tag) {
    for (const ElfW(Dyn) *d = lib->dynamic; d && d->d_tag != DT_NULL; d++)
        if (d->d_tag == tag) return (const void *)(d->d_un.d_ptr < lib->begin ? lib->info->dlpi_addr + d->d_un.d_ptr
                                                                              : d->d_un.d_ptr);
    return NULL;
}

static size_t number(const struct library *lib, ElfW(Sxword) tag) {
    for (const ElfW(Dyn) *d = lib->dynamic; d && d->d_tag != DT_NULL; d++)
        if (d->d_tag == tag) return d->d_un.d_val;
    return 0;
}

static bool write_word(const struct library *lib, uintptr_t *word, uintptr_t value) {
    uintptr_t size = (uintptr_t)sysconf(_SC_PAGESIZE), page = (uintptr_t)word & ~(size - 1);
    bool sealed = (uintptr_t)word >= (lib->relro_begin & ~(size - 1)) && (uintptr_t)word < lib->relro_end;
    if (sealed && mprotect((void *)page, size, PROT_READ | PROT_WRITE)) return false;
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    if (sealed) mprotect((void *)page, size, PROT_READ);
    return true;
}

/* ---- all libraries ---- */

struct work {
    bool lazy;              /* also bind calls that the loader has not bound yet */
    size_t lazy_calls;      /* how many of them there are */
    unsigned char *elsewhere; /* by symbol: the loader will find it elsewhere than in the driver */
    size_t sealed;          /* words that could not be written */
};

static void bind_words(const struct library *lib, const ElfW(Rela) *from, size_t count, struct work *work) {
    for (const ElfW(Rela) *r = from; r < from + count; r++) {
        unsigned type = ELF64_R_TYPE(r->r_info), at = ELF64_R_SYM(r->r_info);
        if ((type != WORD && type != DATA && type != JUMP) || !at || r->r_addend) continue;
        const char *name = lib->names + lib->symbols[at].st_name;
        if (!kp_may_be_the_drivers(name)) continue;
        struct kp_symbol *symbol = kp_symbol_named(name);
        uintptr_t *word = (uintptr_t *)(lib->info->dlpi_addr + r->r_offset), value = symbol ? *word : 0;
        if (!symbol || !symbol->real) continue;
        bool bound = value == (uintptr_t)symbol->real;
        bool unbound = type == JUMP && value >= lib->begin && value < lib->end &&
                       lib->symbols[at].st_shndx == SHN_UNDEF;
        if (unbound) work->lazy_calls++;
        if (!bound && !(unbound && work->lazy && !work->elsewhere[symbol - kp_symbols])) continue;
        work->sealed += !write_word(lib, word, (uintptr_t)symbol->wrapper);
    }
}

static bool is_done(uintptr_t dynamic) {
    for (size_t i = 0; i < seen.count; i++)
        if (seen.done[i] == dynamic) return true;
    return false;
}

static void note_done(uintptr_t dynamic) {
    if (seen.count == seen.room) {
        size_t room = seen.room ? 2 * seen.room : 128;
        uintptr_t *more = realloc(seen.done, room * sizeof *more);
        if (!more) return; /* it is looked through again, which changes nothing */
        seen.done = more;
        seen.room = room;
    }
    seen.done[seen.count++] = dynamic;
}

static int bind_one(struct dl_phdr_info *info, size_t size, void *arg) {
    (void)size;
    struct work *work = arg;
    struct library lib = library(info);
    size_t before = work->lazy_calls;
    if (!lib.dynamic || is_done((uintptr_t)lib.dynamic) || kp_is_the_drivers_library(info->dlpi_name)) return 0;
    lib.symbols = pointer(&lib, DT_SYMTAB);
    lib.names = pointer(&lib, DT_STRTAB);
    const ElfW(Rela) *data = pointer(&lib, DT_RELA), *calls = pointer(&lib, DT_JMPREL);
    if (lib.symbols && lib.names) {
        size_t relative = number(&lib, DT_RELACOUNT), all = number(&lib, DT_RELASZ) / sizeof *data;
        if (data && relative < all) bind_words(&lib, data + relative, all - relative, work);
        if (calls) bind_words(&lib, calls, number(&lib, DT_PLTRELSZ) / sizeof *calls, work);
    }
    if (work->lazy || work->lazy_calls == before) note_done((uintptr_t)lib.dynamic);
    return 0;
}

/* Notes which symbols the loader would not find in the driver: another library that replaces them comes first. A
 * program may itself stand for a name that it only uses (the address of its jump is the function's). */
static void look_elsewhere(unsigned char *elsewhere) {
    for (int i = 0; i < KP_SYMBOLS; i++) {
        Dl_info info;
        const ElfW(Sym) *symbol = NULL;
        void *found = kp_symbols[i].real ? kp_system_dlsym(RTLD_DEFAULT, kp_symbols[i].name) : NULL;
        elsewhere[i] = found && found != kp_symbols[i].real &&
                       !(dladdr1 && dladdr1(found, &info, (void **)&symbol, RTLD_DL_SYMENT) && symbol &&
                         symbol->st_shndx == SHN_UNDEF);
    }
}

static void bind_all(void) {
    struct work work = {0};
    dl_iterate_phdr(bind_one, &work);
    unsigned char *elsewhere = work.lazy_calls ? calloc(KP_SYMBOLS, 1) : NULL;
    if (elsewhere) {
        look_elsewhere(elsewhere);
        work.lazy = true;
        work.elsewhere = elsewhere;
        dl_iterate_phdr(bind_one, &work);
        free(elsewhere);
    }
    if (work.sealed)
        kp_warn("this process may not change the protection of its pages: %zu links to the driver bypass the gate",
                work.sealed);
}

struct loads {
    unsigned long long adds, subs;
    bool driver;
};

static int look(struct dl_phdr_info *info, size_t size, void *loads) {
    (void)size;
    struct loads *found = loads;
    found->adds = info->dlpi_adds;
    found->subs = info->dlpi_subs;
    found->driver = found->driver || kp_is_a_driver(info->dlpi_name);
    return 0;
}

static int count(struct dl_phdr_info *info, size_t size, void *loads) {
    look(info, size, loads);
    return 1; /* the counts are the same in every entry */
}

static void bind_new(void) {
    struct loads loads = {0};
    dl_iterate_phdr(count, &loads);
    if (loads.adds == __atomic_load_n(&seen.adds, __ATOMIC_RELAXED)) return;
    dl_iterate_phdr(look, &loads);
    bool known = kp_real_ready(), found = loads.driver && !kp_disabled() && kp_driver_find();
    /* Whoever waited here could hold the loader's lock, which the thread that binds needs. What was loaded meanwhile is
     * bound at the next look-up. */
    if (pthread_mutex_trylock(&mu)) return;
    if (loads.subs != seen.subs) seen.count = 0; /* what was unloaded may have left its address to another */
    seen.subs = loads.subs;
    __atomic_store_n(&seen.adds, loads.adds, __ATOMIC_RELAXED);
    if (found) bind_all();
    pthread_mutex_unlock(&mu);
    if (found && !known) kp_context_found();
}

EARLY void kp_bind_new(void) {
    if (__atomic_load_n(&started, __ATOMIC_ACQUIRE)) bind_new();
}

/* Runs before main(), and does nothing more than look for a libcuda among the libraries. */
__attribute__((constructor)) static void start(void) {
    if (!kp_system_dlsym_ready()) return;
    __atomic_store_n(&started, true, __ATOMIC_RELEASE);
    kp_bind_new();
}
#endif
