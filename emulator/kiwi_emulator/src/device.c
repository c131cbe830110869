/* Properties of the emulated GPU. */
#include <stdio.h>
#include <string.h>

#include "emu.h"

static CUresult check(CUdevice dev) {
    return dev < 0 || (unsigned)dev >= ke.device_count ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
static const struct ke_gpu *gpu_of(CUdevice dev) { return &ke.state->gpus[ke.devices[dev].gpu]; }

KE_API CUresult cuDriverGetVersion(int *driverVersion) { /* works before cuInit */
    struct ke_state *s = ke_state_get(NULL);
    if (!driverVersion) return CUDA_ERROR_INVALID_VALUE;
    *driverVersion = s ? (int)s->driver_version : 13000;
    return CUDA_SUCCESS;
}

KE_ENTRY(cuDeviceGetCount, (int *out), (out)) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = (int)ke.device_count;
    return CUDA_SUCCESS;
}

KE_ENTRY(cuDeviceGet, (CUdevice *out, int ordinal), (out, ordinal)) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = ordinal;
    return check(ordinal);
}

KE_ENTRY(cuDeviceGetName, (char *out, int len, CUdevice dev), (out, len, dev)) {
    if (!out || len <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (check(dev) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(out, (size_t)len, "%s", gpu_of(dev)->name);
    return CUDA_SUCCESS;
}

KE_ENTRY(cuDeviceGetUuid_v2, (CUuuid *out, CUdevice dev), (out, dev)) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (check(dev) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_DEVICE;
    memcpy(out->bytes, gpu_of(dev)->uuid, 16);
    return CUDA_SUCCESS;
}
/* The form of CUDA 9.2. The two differ on MIG slices only. */
KE_FORWARD(cuDeviceGetUuid, (CUuuid *out, CUdevice dev), in_cuDeviceGetUuid_v2(out, dev))

KE_ENTRY(cuDeviceTotalMem_v2, (size_t *out, CUdevice dev), (out, dev)) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (check(dev) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_DEVICE;
    *out = gpu_of(dev)->total_bytes;
    return CUDA_SUCCESS;
}

static CUresult bus_id(char *out, int len, CUdevice dev) {
    if (!out || len < 13) return CUDA_ERROR_INVALID_VALUE;
    if (check(dev) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(out, (size_t)len, "0000:%02x:00.0", ke.devices[dev].gpu + 1);
    return CUDA_SUCCESS;
}
KE_FORWARD(cuDeviceGetPCIBusId, (char *text, int len, CUdevice dev), bus_id(text, len, dev))

KE_ENTRY(cuDeviceGetByPCIBusId, (CUdevice *out, const char *text), (out, text)) {
    char own[16];
    if (!out || !text) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < ke.device_count; i++) {
        bus_id(own, sizeof own, (CUdevice)i);
        *out = (CUdevice)i;
        if (strcmp(own, text) == 0) return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

KE_ENTRY(cuDeviceCanAccessPeer, (int *out, CUdevice a, CUdevice b), (out, a, b)) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (check(a) != CUDA_SUCCESS || check(b) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_DEVICE;
    *out = 0;
    return CUDA_SUCCESS;
}

KE_ENTRY(cuDeviceComputeCapability, (int *major, int *minor, CUdevice dev), (major, minor, dev)) {
    if (!major || !minor) return CUDA_ERROR_INVALID_VALUE;
    *major = 9;
    *minor = 0;
    return check(dev);
}

/* Attribute numbers as in the API reference. An attribute that is not listed is 0: "no", "none", "not supported"; in
 * particular there is no managed memory, no peer access and no shareable handle. */
static const struct {
    int attribute, value;
} attributes[] = {
    {1, 1024},        /* MAX_THREADS_PER_BLOCK */
    {2, 1024},        /* MAX_BLOCK_DIM_X, Y, Z */
    {3, 1024},
    {4, 64},
    {5, 2147483647},  /* MAX_GRID_DIM_X, Y, Z */
    {6, 65535},
    {7, 65535},
    {8, 49152},       /* MAX_SHARED_MEMORY_PER_BLOCK */
    {9, 65536},       /* TOTAL_CONSTANT_MEMORY */
    {10, 32},         /* WARP_SIZE */
    {11, 2147483647}, /* MAX_PITCH */
    {12, 65536},      /* MAX_REGISTERS_PER_BLOCK */
    {13, 1000000},    /* CLOCK_RATE, kHz */
    {14, 512},        /* TEXTURE_ALIGNMENT */
    {15, 1},          /* GPU_OVERLAP */
    {16, KE_MULTIPROCESSORS}, /* MULTIPROCESSOR_COUNT */
    {19, 1},          /* CAN_MAP_HOST_MEMORY */
    {31, 1},          /* CONCURRENT_KERNELS */
    {36, 1000000},    /* MEMORY_CLOCK_RATE, kHz */
    {37, 512},        /* GLOBAL_MEMORY_BUS_WIDTH */
    {38, 1 << 20},    /* L2_CACHE_SIZE */
    {39, 2048},       /* MAX_THREADS_PER_MULTIPROCESSOR */
    {40, 2},          /* ASYNC_ENGINE_COUNT */
    {41, 1},          /* UNIFIED_ADDRESSING */
    {51, 32},         /* TEXTURE_PITCH_ALIGNMENT */
    {75, 9},          /* COMPUTE_CAPABILITY_MAJOR, MINOR */
    {76, 0},
    {78, 1},          /* STREAM_PRIORITIES_SUPPORTED */
    {81, 233472},     /* MAX_SHARED_MEMORY_PER_MULTIPROCESSOR */
    {82, 65536},      /* MAX_REGISTERS_PER_MULTIPROCESSOR */
    {90, 1},          /* COMPUTE_PREEMPTION_SUPPORTED */
    {91, 1},          /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
    {97, 232448},     /* MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
    {99, 1},          /* HOST_REGISTER_SUPPORTED */
    {102, 1},         /* VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    {106, 32},        /* MAX_BLOCKS_PER_MULTIPROCESSOR */
    {111, 1024},      /* RESERVED_SHARED_MEMORY_PER_BLOCK */
    {115, 1},         /* MEMORY_POOLS_SUPPORTED */
    {129, 1},         /* UNIFIED_FUNCTION_POINTERS */
};

static CUresult attribute(int *out, int what, CUdevice dev) {
    if (!out || what <= 0 || what > 400) return CUDA_ERROR_INVALID_VALUE;
    if (check(dev) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_DEVICE;
    *out = 0;
    if (what == 33) *out = (int)ke.devices[dev].gpu + 1; /* PCI_BUS_ID */
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
        if (attributes[i].attribute == what) *out = attributes[i].value;
    }
    return CUDA_SUCCESS;
}
KE_API CUresult cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev) {
    KE_CALL_ANSWERED(KE_QUESTIONS_PASS, attribute(pi, (int)attrib, dev));
}
