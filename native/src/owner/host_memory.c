/* Host memory from the system: mappings, NUMA, and how much is left. */
#define _GNU_SOURCE
#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/real.h"
#include "owner/arena.h"

#define SPARED 8 /* memory that is only for speed leaves 1/SPARED of the machine's memory alone */
#define MPOL_PREFERRED_ 1 /* from linux/mempolicy.h; a full node falls back to another */

void *kp_host_map(size_t bytes, int numa_node) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return NULL;
    madvise(at, bytes, MADV_DONTFORK); /* a child has no GPU, and copy-on-write would move pinned pages */
    madvise(at, bytes, MADV_DONTDUMP); /* without Kiwi a core file has no GPU memory either; a debugger still sees it */
    madvise(at, bytes, MADV_HUGEPAGE);
    if (numa_node >= 0 && numa_node < 64) {
        unsigned long mask = 1ul << numa_node;
        syscall(SYS_mbind, at, bytes, MPOL_PREFERRED_, &mask, 64ul, 0u);
    }
    return at;
}

void kp_host_unmap(void *at, size_t bytes) { munmap(at, bytes); }

/* Reads the number in a file of one line, or after `key` in a file of many; false: there is none ("max"). */
static bool number_in(const char *path, const char *key, uint64_t *out) {
    char line[256];
    bool found = false;
    unsigned long long n;
    FILE *f = fopen(path, "re");
    if (!f) return false;
    while (!found && fgets(line, sizeof line, f)) {
        size_t skip = strlen(key);
        if (strncmp(line, key, skip) != 0) continue;
        found = sscanf(line + skip, "%llu", &n) == 1;
    }
    fclose(f);
    if (found) *out = n;
    return found;
}

struct memory {
    uint64_t total, left;
};

static void tighter(struct memory *m, uint64_t total, uint64_t left) {
    if (total < m->total) m->total = total;
    if (left < m->left) m->left = left;
}

/* Applies the limits of `group`, whose hierarchy is mounted at `root`, and of its parents. Changes `group`. */
static void upwards(struct memory *m, const char *root, const char *max, const char *current, char *group) {
    char path[PATH_MAX + 64];
    uint64_t limit, used;
    while (group[0] == '/') {
        snprintf(path, sizeof path, "%s%s/%s", root, group, max);
        bool limited = number_in(path, "", &limit);
        snprintf(path, sizeof path, "%s%s/%s", root, group, current);
        if (limited && number_in(path, "", &used)) tighter(m, limit, used < limit ? limit - used : 0);
        if (!group[1]) break;
        *strrchr(group, '/') = 0;
        if (!group[0]) strcpy(group, "/");
    }
}

/* Applies the limits of our control groups of version 2 and 1. A line is "NUMBER:CONTROLLERS:GROUP". */
static void groups(struct memory *m) {
    char line[PATH_MAX];
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f) return;
    while (fgets(line, sizeof line, f)) {
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        if (!controllers[1])
            upwards(m, "/sys/fs/cgroup", "memory.max", "memory.current", group);
        else if (strcmp(controllers + 1, "memory") == 0)
            upwards(m, "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", group);
    }
    fclose(f);
}

static struct memory look(void) {
    struct memory m = {UINT64_MAX, UINT64_MAX};
    uint64_t total, left;
    groups(&m);
    if (number_in("/proc/meminfo", "MemTotal:", &total) && number_in("/proc/meminfo", "MemAvailable:", &left))
        tighter(&m, total * 1024, left * 1024);
    return m;
}

uint64_t kp_host_available(void) { return look().left; }

bool kp_host_to_spare(uint64_t bytes) {
    struct memory m = look();
    return m.left >= m.total / SPARED && m.left - m.total / SPARED >= bytes;
}

int kp_host_numa_node(CUdevice device) {
    char bus[32] = "", path[96];
    uint64_t node;
    if (kp_real.cuDeviceGetPCIBusId(bus, sizeof bus, device) != CUDA_SUCCESS) return -1;
    for (char *c = bus; *c; c++) *c = (char)tolower((unsigned char)*c);
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", bus);
    return number_in(path, "", &node) && node < 64 ? (int)node : -1; /* the file has "-1" if the node is not known */
}
