/* Finds libcuda and fills the tables from it. Takes no lock of ours around calls of the loader, which has a lock
 * itself: filling the tables twice writes the same values. */
#define _GNU_SOURCE
#include "hooks/driver.h"

#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/kiwi_preload.h"
#include "base/log.h"
#include "hooks/calls.h"
#define KP_REAL_NAMES
#include "base/real.h"
#include "hooks/start.h"

static struct link_map *driver; /* written once, when the tables are filled */

bool kp_real_ready(void) { return __atomic_load_n(&driver, __ATOMIC_ACQUIRE) != NULL; }

#pragma weak dladdr1 /* not in musl, where no driver is ever found */

static struct link_map *library_of(const void *address) {
    Dl_info info;
    struct link_map *map = NULL;
    if (!address || !dladdr1 || !dladdr1(address, &info, (void **)&map, RTLD_DL_LINKMAP)) return NULL;
    return map;
}

void *kp_look_up_beside(const void *address, const char *name) {
    struct link_map *map = library_of(address);
    void *handle = map ? dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    void *found = handle ? kp_system_dlsym(handle, name) : NULL;
    if (handle) dlclose(handle);
    return found;
}

bool kp_same_library(const void *one, const void *other) {
    struct link_map *map = library_of(one);
    return map && map == library_of(other);
}

static bool called(const char *path, const char *prefix) {
    const char *slash = path ? strrchr(path, '/') : NULL;
    const char *file = slash ? slash + 1 : path;
    return file && strncmp(file, prefix, strlen(prefix)) == 0;
}

bool kp_is_a_driver(const char *path) { return called(path, "libcuda.so"); }

bool kp_is_the_drivers_library(const char *path) {
    return kp_is_a_driver(path) || called(path, "libcudadebugger.so") || called(path, "libnvidia-");
}

static void fill(void *handle) {
    void **member = (void **)&kp_real;
    for (size_t i = 0; i < sizeof kp_real_names / sizeof *kp_real_names; i++) {
        void *found = kp_system_dlsym(handle, kp_real_names[i]);
        __atomic_store_n(&member[i], found, __ATOMIC_RELAXED);
    }
    for (int i = 0; i < KP_SYMBOLS; i++) {
        void *found = kp_system_dlsym(handle, kp_symbols[i].name);
        __atomic_store_n(&kp_symbols[i].real, found, __ATOMIC_RELAXED);
    }
}

static bool only(const struct link_map *known, const struct link_map *map) {
    if (known != map)
        kp_warn("this program has loaded a second CUDA driver, %s, beside %s: Kiwi does not see its calls",
                map->l_name, known->l_name);
    return known == map;
}

/* Returns whether the library is the toolkit's stub, which programs are linked against where there is no driver. It
 * may have been copied anywhere; every function of it answers the same. */
static bool is_stub(void *handle, const struct link_map *map) {
    int version;
    CUresult (*ask)(int *) = (CUresult (*)(int *))kp_system_dlsym(handle, "cuDriverGetVersion");
    return strstr(map->l_name, "/stubs/") || (ask && ask(&version) == CUDA_ERROR_STUB_LIBRARY);
}

static bool adopt(struct link_map *map) {
    struct link_map *known = __atomic_load_n(&driver, __ATOMIC_ACQUIRE);
    if (known) return only(known, map);
    void *handle = dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) return false;
    bool good = kp_system_dlsym(handle, "cuInit") && !is_stub(handle, map);
    /* NODELETE: a program may close its libcuda and open it again, and we hold addresses. */
    if (good) good = dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE) != NULL;
    if (!good) dlclose(handle);
    if (!good) return false;
    fill(handle);
    kp_driver_used();
    if (!__atomic_compare_exchange_n(&driver, &known, map, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return only(known, map);
    kp_note("libcuda is %s", map->l_name);
    return true;
}

bool kp_in_driver(const void *address) {
    struct link_map *map = library_of(address);
    return map && (map == __atomic_load_n(&driver, __ATOMIC_ACQUIRE) || kp_is_a_driver(map->l_name)) &&
           adopt(map);
}

bool kp_in_driver_libraries(const void *address) {
    struct link_map *map = library_of(address);
    if (map && map == __atomic_load_n(&driver, __ATOMIC_ACQUIRE)) return true;
    return map && kp_is_the_drivers_library(map->l_name);
}

bool kp_in_nvml(const void *address) {
    static struct link_map *nvml;
    struct link_map *map = library_of(address);
    if (!map || map == __atomic_load_n(&nvml, __ATOMIC_ACQUIRE)) return map != NULL;
    if (!called(map->l_name, "libnvidia-ml.so")) return false;
    if (!dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE)) return false;
    __atomic_store_n(&nvml, map, __ATOMIC_RELEASE);
    return true;
}

bool kp_in_this_library(const void *address) {
    static struct link_map *self;
    struct link_map *us = __atomic_load_n(&self, __ATOMIC_ACQUIRE);
    if (!us) __atomic_store_n(&self, us = library_of(&self), __ATOMIC_RELEASE);
    return us && library_of(address) == us;
}

#ifdef KP_GATE
/* The driver's own path: by the name alone the loader finds this library, which has the same name. The driver is
 * loaded when it is first needed, because loading takes a while and most programs never need it. */
static const char *driver_path;

KP_API __attribute__((used)) int kiwi_gate_start(const char *path) {
    const char *before = __atomic_load_n(&driver_path, __ATOMIC_ACQUIRE);
    if (!path || (before && strcmp(path, before) == 0)) return path != NULL;
    char *kept = kp_real_ready() ? NULL : strdup(path); /* never freed: another thread may be using the old one */
    if (kept) __atomic_store_n(&driver_path, kept, __ATOMIC_RELEASE);
    return kept != NULL;
}

bool kp_driver_find(void) {
    if (kp_real_ready()) return true;
    const char *path = __atomic_load_n(&driver_path, __ATOMIC_ACQUIRE);
    void *handle = path ? dlopen(path, RTLD_LAZY | RTLD_LOCAL) : NULL;
    if (!handle) {
        kp_warn("the CUDA driver %s cannot be loaded: %s", path ? path : "(none was named)",
                path ? dlerror() : "kiwi_gate_start() was not called");
        return false;
    }
    void *init = kp_system_dlsym(handle, "cuInit");
    struct link_map *map = library_of(init);
    bool found = map && !kp_in_this_library(init) && adopt(map);
    dlclose(handle); /* it stays: see adopt */
    return found;
}

/* Returns whether a loaded library is a driver other than ours. Called for each loaded library. */
static int is_other(struct dl_phdr_info *info, size_t size, void *known) {
    (void)size;
    const char *slash = strrchr(info->dlpi_name, '/'), *file = slash ? slash + 1 : info->dlpi_name;
    if (strncmp(file, "libcuda.so", strlen("libcuda.so")) != 0) return 0;
    return !known || strcmp(info->dlpi_name, ((struct link_map *)known)->l_name) != 0;
}

/* Gets the number of libraries loaded so far, which the entry of any library has. */
static int count_loads(struct dl_phdr_info *info, size_t size, void *loads) {
    (void)size;
    *(unsigned long long *)loads = info->dlpi_adds;
    return 1;
}

/* Returns whether another driver is loaded: a program that loads the driver by its path bypasses us. It is
 * called for each cell of a notebook, so it looks through the libraries, often hundreds, only if one was
 * loaded since the last call. */
bool kp_driver_bypassed(void) {
    static unsigned long long alone; /* number of libraries loaded when there was no other driver */
    unsigned long long loads = 0;
    dl_iterate_phdr(count_loads, &loads);
    if (loads == __atomic_load_n(&alone, __ATOMIC_RELAXED)) return false;
    if (dl_iterate_phdr(is_other, __atomic_load_n(&driver, __ATOMIC_ACQUIRE))) return true;
    __atomic_store_n(&alone, loads, __ATOMIC_RELAXED);
    return false;
}
#else
/* Returns false: every look-up passes this library, however the driver was loaded. */
bool kp_driver_bypassed(void) { return false; }

bool kp_driver_find(void) {
    if (kp_real_ready()) return true;
    void *init = kp_system_dlsym(RTLD_NEXT, "cuInit"); /* the program is linked with it */
    if (init && kp_in_driver(init)) return true;
    void *handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) return false;
    init = kp_system_dlsym(handle, "cuInit");
    bool found = init && kp_in_driver(init);
    dlclose(handle);
    return found;
}
#endif
