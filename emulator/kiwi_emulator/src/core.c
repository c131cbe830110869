/* Initialisation, the gate that the checkpoint API closes, fork and exit. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emu.h"

struct ke_process ke = {
    .mu = PTHREAD_MUTEX_INITIALIZER,
    .gate = PTHREAD_COND_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER,
};
__thread bool ke_in_callback;

/* Enters a call. While the process is locked every call waits here, including the last calls of a normal exit: an
 * interpreter that frees its memory on exit waits until a caller unlocks it, as with the real driver. Signals and
 * os._exit end the process at once. */
CUresult ke_enter(void) {
    bool skip = false;
    return ke_enter_unheld(0, &skip);
}

/* Crashes as real programs do: the driver reads memory that is not there. */
static void crash(void) {
    volatile uintptr_t nowhere = KE_PAGE;
    for (;;) *(volatile char *)nowhere;
}

bool ke_has(enum ke_quirk quirk) { return ke.state->quirks & quirk; }

enum ke_hold ke_held(enum ke_quirk quirk) {
    if (__atomic_load_n(&ke.forked, __ATOMIC_RELAXED)) return KE_FREE; /* the fork may have copied a taken mutex */
    pthread_mutex_lock(&ke.mu);
    enum ke_hold how = ke.hold;
    pthread_mutex_unlock(&ke.mu);
    return how != KE_FREE && ke_has(quirk) ? how : KE_FREE;
}

CUresult ke_enter_unheld(enum ke_quirk quirk, bool *skip) {
    bool in_time = false; /* the call came before the lock was complete: a later checkpoint cannot crash it */
    if (ke_in_callback) return CUDA_ERROR_NOT_PERMITTED;
    if (__atomic_load_n(&ke.forked, __ATOMIC_RELAXED)) return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&ke.mu);
    if (!ke.initialised) {
        pthread_mutex_unlock(&ke.mu);
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    bool unheld = quirk && ke_has(quirk);
    while (ke.hold != KE_FREE && !*skip) {
        if (ke.hold == KE_LOCKING) in_time = true;
        else if (unheld && ke.hold == KE_OUT && !in_time) {
            pthread_mutex_unlock(&ke.mu);
            crash();
        } else if (unheld) *skip = true;
        if (!*skip) pthread_cond_wait(&ke.gate, &ke.mu);
    }
    if (!*skip) ke.inside++;
    pthread_mutex_unlock(&ke.mu);
    return CUDA_SUCCESS;
}

void ke_leave(void) {
    pthread_mutex_lock(&ke.mu);
    if (--ke.inside == 0 && ke.hold != KE_FREE) pthread_cond_broadcast(&ke.done);
    if (ke.inside == 0 && ke.pending == 0) ke_maps_bury();
    pthread_mutex_unlock(&ke.mu);
    ke_user_objects_bury();
}

/* Prepares a forked child, which has the parent's memory but none of its threads: the child must not touch the
 * parent's slot or answer on its socket. Device mappings are MADV_DONTFORK, so the child does not have them. */
static void after_fork_in_child(void) {
    ke.forked = true;
    ke.slot = NULL;
    for (unsigned i = 0; i < ke.device_count; i++) close(ke.devices[i].memfd);
    ke_server_forget();
    ke_control_forget();
}

/* Finds the GPU of a word in CUDA_VISIBLE_DEVICES: an index or a UUID (or its beginning); the list ends at the first
 * unknown one. */
static int find_gpu(const struct ke_state *s, const char *word) {
    char *end;
    long index = strtol(word, &end, 10);
    if (*word && *end == 0) return index >= 0 && index < (long)s->gpu_count ? (int)index : -1;
    if (strncmp(word, "GPU-", 4) != 0) return -1;
    for (unsigned i = 0; i < s->gpu_count; i++) {
        char text[48];
        const uint8_t *u = s->gpus[i].uuid;
        snprintf(text, sizeof text,
                 "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0],
                 u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13],
                 u[14], u[15]);
        if (strncmp(text, word, strlen(word)) == 0) return (int)i;
    }
    return -1;
}

static bool add_device(unsigned gpu) {
    for (unsigned i = 0; i < ke.device_count; i++) {
        if (ke.devices[i].gpu == gpu) return false;
    }
    struct ke_device *d = &ke.devices[ke.device_count];
    d->gpu = gpu;
    d->memfd = memfd_create("kiwi-emulated-gpu", MFD_CLOEXEC);
    if (d->memfd < 0) return false;
    d->default_pool = (struct CUmemPoolHandle_st){
        .magic = 0x900c, .dev = ke.device_count, .is_default = true, .reuse = {1, 1, 1}};
    d->current_pool = &d->default_pool;
    ke.device_count++;
    return true;
}

static void find_devices(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) {
        for (unsigned i = 0; i < ke.state->gpu_count; i++) add_device(i);
        return;
    }
    char *copy = strdup(visible), *save = NULL;
    for (char *w = strtok_r(copy, ", ", &save); w; w = strtok_r(NULL, ", ", &save)) {
        int gpu = find_gpu(ke.state, w);
        if (gpu < 0 || !add_device((unsigned)gpu)) break;
    }
    free(copy);
}

static CUresult initialise(void) {
    const char *why = NULL;
    struct ke_state *s = ke_state_get(&why);
    if (!s) {
        static bool said;
        if (!said) fprintf(stderr, "kiwi emulated driver: no device: %s\n", why);
        said = true;
        return CUDA_ERROR_NO_DEVICE;
    }
    ke.state = s;
    if (ke.device_count == 0) find_devices();
    if (ke.device_count == 0) return CUDA_ERROR_NO_DEVICE;
    static bool hooked;
    if (!hooked) pthread_atfork(NULL, NULL, after_fork_in_child);
    hooked = true;
    /* First the socket: to processes in other PID namespaces, a slot without a socket belongs to a process
     * that has ended. */
    CUresult rc = ke_server_listen();
    if (rc != CUDA_SUCCESS) return rc;
    if (!ke.slot && !(ke.slot = ke_proc_register(s))) return CUDA_ERROR_OUT_OF_MEMORY;
    /* The thread that answers comes last, because its answers read the slot. Requests that come earlier wait
     * in the socket. */
    rc = ke_server_answer();
    if (rc != CUDA_SUCCESS) return rc;
    ke.initialised = true;
    return CUDA_SUCCESS;
}

KE_API CUresult cuInit(unsigned int flags) {
    if (ke.forked) return CUDA_ERROR_NOT_INITIALIZED;
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    CUresult rc = ke.initialised ? CUDA_SUCCESS : initialise();
    ke_mu_unlock();
    return rc;
}

KE_API const char *kiwi_emulator_version(void);
KE_API const char *kiwi_emulator_version(void) { return "kiwi emulated CUDA driver, layout 4"; }

/* Clears the books at a normal exit; after a kill, the next process that reads the books does so. */
__attribute__((destructor)) static void at_exit(void) {
    if (!ke.initialised || ke.forked || !ke.slot) return;
    ke_server_stop();
    ke_proc_unregister(ke.state, ke.slot);
}
