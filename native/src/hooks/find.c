/* dlsym: a look-up of a function of the driver returns its wrapper. Calls that the loader has bound are bound to
 * the wrappers in bind.c. The library that is loaded under libcuda's own name (KP_GATE) does not need this: look-ups
 * there find what it exports.
 *
 * One unversioned definition serves programs built against any glibc. Other look-ups must reach the system's
 * dlsym as if we were not there: that function uses its return address to know what "the next library" is, so
 * it has to be jumped to, not called. Hence the few lines of assembler.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <string.h>

#include "base/kiwi_preload.h"
#include "base/log.h"
#include "hooks/bind.h"
#include "hooks/calls.h"
#include "hooks/driver.h"

#ifdef KP_GATE
bool kp_system_dlsym_ready(void) { return true; }
void *kp_system_dlsym(void *handle, const char *name) { return dlsym(handle, name); }
#else

typedef void *dlsym_fn(void *handle, const char *name);

struct answer {
    void *address;
    uintptr_t decided; /* 0: jump to the system's dlsym */
};

__attribute__((visibility("hidden"))) dlsym_fn *kp_dlsym_of_system;
__attribute__((visibility("hidden"), used)) EARLY static bool may_be_nvmls(const char *name) {
    return name && name[0] == 'n' && name[1] == 'v' && name[2] == 'm' && name[3] == 'l' && name[4] >= 'A' &&
           name[4] <= 'Z';
}

/* Returns the wrapper of a function of NVML; one that is searched for in the next library is not replaced. */
static struct answer look_up_nvml(void *handle, const char *name, void *caller) {
    void *real = handle == RTLD_NEXT ? NULL : kp_system_dlsym(handle, name);
    if (!real || kp_disabled() || kp_in_driver_libraries(caller) || !kp_in_nvml(real)) return (struct answer){NULL, 0};
    return (struct answer){kp_wrapper_of_nvml(name, real), 1};
}

EARLY struct answer kp_look_up(void *handle, const char *name,
                                                                           void *caller);

#if defined(__x86_64__)
__asm__(".text\n"
        ".globl dlsym\n"
        ".type dlsym, @function\n"
        "dlsym:\n"
        "    .cfi_startproc\n"
        "    endbr64\n"
        "    movq (%rsp), %rdx\n"
        "    pushq %rdi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    pushq %rsi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    subq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    call kp_look_up\n"
        "    addq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rsi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rdi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    testq %rdx, %rdx\n"
        "    jz 1f\n"
        "    ret\n"
        "1:  jmp *kp_dlsym_of_system(%rip)\n"
        "    .cfi_endproc\n"
        ".size dlsym, .-dlsym\n");
#elif defined(__aarch64__)
__asm__(".text\n"
        ".globl dlsym\n"
        ".type dlsym, %function\n"
        "dlsym:\n"
        "    .cfi_startproc\n"
        "    hint #34\n" /* bti c */
        "    stp x29, x30, [sp, #-32]!\n"
        "    .cfi_def_cfa_offset 32\n"
        "    .cfi_offset 29, -32\n"
        "    .cfi_offset 30, -24\n"
        "    mov x29, sp\n"
        "    stp x0, x1, [sp, #16]\n"
        "    mov x2, x30\n"
        "    bl kp_look_up\n"
        "    cbnz x1, 1f\n"
        "    ldp x0, x1, [sp, #16]\n"
        "    ldp x29, x30, [sp], #32\n"
        "    adrp x16, kp_dlsym_of_system\n"
        "    ldr x16, [x16, #:lo12:kp_dlsym_of_system]\n"
        "    br x16\n"
        "1:  ldp x29, x30, [sp], #32\n"
        "    ret\n"
        "    .cfi_endproc\n"
        ".size dlsym, .-dlsym\n");
#else
#error "libkiwi_preload needs its dlsym written for this processor"
#endif

#pragma weak dlvsym

/* Finds dlsym in a libc that has no dlvsym: musl's, whose programs run without Kiwi, and must run. */
EARLY static int look_in(struct dl_phdr_info *info, size_t size, void *found) {
    const ElfW(Dyn) *dynamic = NULL;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const uint32_t *hash = NULL;
    uintptr_t base = info->dlpi_addr;
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) dynamic = (const void *)(base + info->dlpi_phdr[i].p_vaddr);
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) { /* musl leaves these addresses relative */
        const void *at = (const void *)(base + dynamic->d_un.d_ptr);
        if (dynamic->d_tag == DT_SYMTAB) symbols = at;
        if (dynamic->d_tag == DT_STRTAB) names = at;
        if (dynamic->d_tag == DT_HASH) hash = at;
    }
    for (uint32_t i = 0; symbols && names && hash && i < hash[1]; i++) {
        void *at = (void *)(base + symbols[i].st_value);
        if (!symbols[i].st_shndx || strcmp(names + symbols[i].st_name, "dlsym") || at == (void *)dlsym) continue;
        *(void **)found = at;
        return 1;
    }
    return 0;
}

EARLY bool kp_system_dlsym_ready(void) {
    if (__atomic_load_n(&kp_dlsym_of_system, __ATOMIC_ACQUIRE)) return true;
    if (!dlvsym) {
        void *other = NULL;
        dl_iterate_phdr(look_in, &other);
        __atomic_store_n(&kp_dlsym_of_system, (dlsym_fn *)other, __ATOMIC_RELEASE);
        return other != NULL;
    }
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        dlsym_fn *found = (dlsym_fn *)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
        if (!found) continue;
        __atomic_store_n(&kp_dlsym_of_system, found, __ATOMIC_RELEASE);
        return true;
    }
    return false;
}

void *kp_system_dlsym(void *handle, const char *name) {
    return kp_system_dlsym_ready() ? kp_dlsym_of_system(handle, name) : NULL;
}

EARLY bool kp_may_be_the_drivers(const char *name) {
    return name && name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z';
}

/* Returns what the search finds in its caller's place, as far as that can be known without being there: a default
 * search goes on in what the caller was loaded with, and the next library after ours may be the caller itself. */
static void *found_for(void *caller, void *handle, const char *name) {
    void *found = kp_system_dlsym(handle, name);
    if (!found && handle == RTLD_DEFAULT) found = kp_look_up_beside(caller, name);
    if (found && handle == RTLD_NEXT && kp_same_library(found, caller)) {
        struct kp_symbol *symbol = kp_driver_find() ? kp_symbol_named(name) : NULL;
        found = symbol ? kp_symbol_real(symbol) : NULL;
    }
    return found;
}

EARLY struct answer kp_look_up(void *handle, const char *name, void *caller) {
    const struct answer go_on = {NULL, 0};
    if (!kp_system_dlsym_ready()) return (struct answer){NULL, 1};
    if (handle != RTLD_NEXT) kp_bind_new(); /* (a sanitizer looks up the next library's before it has started) */
    if (may_be_nvmls(name)) return look_up_nvml(handle, name, caller);
    if (!kp_may_be_the_drivers(name)) return go_on;
    void *real = found_for(caller, handle, name);
    /* Anything but the driver is searched for again in the caller's place, with the caller's result and error. */
    if (!real || kp_disabled() || kp_in_driver_libraries(caller) || !kp_in_driver(real)) return go_on;
    return (struct answer){kp_wrapper_of_symbol(name, real), 1};
}
#endif
