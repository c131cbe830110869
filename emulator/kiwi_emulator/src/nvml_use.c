/* NVML's answers about how busy an emulated GPU is: utilisation, temperature, power. */
#define _GNU_SOURCE
#include <time.h>

#include "nvml.h"

#define SAMPLE_NS 20000000ull /* a utilisation sample covers at least this much time */

/* ---- utilisation ----------------------------------------------------------------------------------------- */
/* Each process counts its busy time; its share is the growth of that since this reader last looked. */

struct sample {
    unsigned pid;
    unsigned long long stamp_us;
    unsigned sm, memory, encoder, decoder;
};

static uint64_t busy_of(const struct ke_proc *p, unsigned gpu, uint64_t now) {
    uint64_t since = __atomic_load_n(&p->busy_since_ns[gpu], __ATOMIC_ACQUIRE);
    return p->busy_ns[gpu] + (since && now > since ? now - since : 0);
}

static unsigned share(uint64_t busy, uint64_t time) {
    uint64_t percent = time ? busy * 100 / time : 0;
    return percent > 100 ? 100 : (unsigned)percent;
}

static const struct reading *read_process(nvmlDevice_t d, int slot, uint64_t now) {
    const struct ke_proc *p = &state->procs[slot];
    struct reading *r = &d->readings[slot];
    uint64_t busy = busy_of(p, d->gpu, now);
    if (r->pid != p->pid || r->start_ticks != p->start_ticks)
        *r = (struct reading){.pid = p->pid, .start_ticks = p->start_ticks, .at_ns = p->since_ns};
    if (now - r->at_ns < SAMPLE_NS) return r;
    r->percent = share(busy - r->busy_ns, now - r->at_ns);
    r->at_ns = now;
    r->busy_ns = busy;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    r->stamp_us = (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
    return r;
}

API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t d, struct sample *out, unsigned *count,
                                                 unsigned long long last_seen_us) {
    nvmlReturn_t rc = check(d);
    if (rc || !count) return rc ? rc : INVALID_ARGUMENT;
    if (!out) { /* the caller asks for the number of entries */
        *count = KE_PROCS_MAX;
        return INSUFFICIENT_SIZE;
    }
    unsigned n = 0;
    pthread_mutex_lock(&mu);
    ke_state_lock(state);
    ke_reap(state);
    uint64_t now = ke_now_ns();
    for (int i = 0; i < KE_PROCS_MAX && n < *count; i++) {
        const struct ke_proc *p = &state->procs[i];
        if (p->pid == 0 || p->context_bytes[d->gpu] == 0 || shown(p, d->gpu) == 0) continue;
        int pid = ke_pid_here(state, p);
        if (pid <= 0) continue;
        const struct reading *r = read_process(d, i, now);
        if (r->stamp_us <= last_seen_us) continue;
        out[n++] = (struct sample){(unsigned)pid, r->stamp_us, r->percent, r->percent / 2, 0, 0};
    }
    ke_state_unlock(state);
    pthread_mutex_unlock(&mu);
    *count = n;
    return n ? SUCCESS : NOT_FOUND;
}

struct utilization {
    unsigned gpu, memory;
};

/* Returns the utilisation by all processes together, assuming that their kernels do not overlap. */
static unsigned busy_percent(nvmlDevice_t d) {
    pthread_mutex_lock(&mu);
    ke_state_lock(state);
    ke_reap(state);
    uint64_t now = ke_now_ns(), busy = 0;
    for (int i = 0; i < KE_PROCS_MAX; i++) {
        if (state->procs[i].pid) busy += busy_of(&state->procs[i], d->gpu, now);
    }
    ke_state_unlock(state);
    if (now - d->at_ns >= SAMPLE_NS) {
        /* a process has ended, and its count is gone: start again */
        d->percent = d->at_ns && busy >= d->busy_ns ? share(busy - d->busy_ns, now - d->at_ns) : 0;
        d->at_ns = now;
        d->busy_ns = busy;
    }
    unsigned percent = d->percent;
    pthread_mutex_unlock(&mu);
    return percent;
}

API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t d, struct utilization *out) {
    nvmlReturn_t rc = check(d);
    if (rc || !out) return rc ? rc : INVALID_ARGUMENT;
    unsigned percent = busy_percent(d);
    *out = (struct utilization){percent, percent / 2};
    return SUCCESS;
}

/* ---- temperature and power: plausible values for a GPU that is as busy ------------------- */

enum { IDLE_C = 34, BUSY_C = 71, IDLE_MW = 72000, LIMIT_MW = 700000 };

static nvmlReturn_t between(nvmlDevice_t d, unsigned *out, unsigned idle, unsigned busy) {
    nvmlReturn_t rc = check(d);
    if (rc || !out) return rc ? rc : INVALID_ARGUMENT;
    *out = idle + (busy - idle) * busy_percent(d) / 100;
    return SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t d, int sensor, unsigned *celsius) {
    return sensor ? INVALID_ARGUMENT : between(d, celsius, IDLE_C, BUSY_C);
}
API nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t d, unsigned *milliwatts) {
    return between(d, milliwatts, IDLE_MW, LIMIT_MW * 9 / 10);
}
API nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t d, unsigned *milliwatts) {
    return between(d, milliwatts, LIMIT_MW, LIMIT_MW);
}
