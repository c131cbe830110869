/* cuGetProcAddress, and the names of results. Entry points are only addresses here. */
#define _GNU_SOURCE
#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_FOUND = 500, NOT_SUPPORTED = 801 };
enum { FOUND = 0, NO_SUCH_SYMBOL = 1, VERSION_NOT_SUFFICIENT = 2 };

#define E(name, version, symbol) extern void symbol(void);
#include "entries.def"
#undef E

API int cuDriverGetVersion(int *version);
API int cuGetProcAddress(const char *symbol, void **pfn, int version, unsigned long long flags);
API int cuGetErrorName(int error, const char **text);
API int cuGetErrorString(int error, const char **text);
API int cuGetProcAddress_v2(const char *symbol, void **pfn, int version, unsigned long long flags,
                            int *status);

static const struct {
    const char *name;
    int since;
    void (*address)(void);
} entries[] = {
#define E(name, version, symbol) {name, version, symbol},
#include "entries.def"
#undef E
    /* these are called or defined in this file, so their types matter */
    {"cuDriverGetVersion", 2020, (void (*)(void))cuDriverGetVersion},
    {"cuGetErrorName", 6000, (void (*)(void))cuGetErrorName},
    {"cuGetErrorString", 6000, (void (*)(void))cuGetErrorString},
    {"cuGetProcAddress", 11030, (void (*)(void))cuGetProcAddress},
    {"cuGetProcAddress", 12000, (void (*)(void))cuGetProcAddress_v2},
};

/* Names that the header knows. */
static const struct {
    const char *name;
    int since;
} names[] = {
#define N(symbol, name, since) {name, since},
#include "names.def"
#undef N
};

static int refuse(void) { return NOT_SUPPORTED; }

static int look_up_name(const char *symbol, int version) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(names[i].name, symbol) == 0) return names[i].since > version ? VERSION_NOT_SUFFICIENT : FOUND;
    }
    return NO_SUCH_SYMBOL;
}

/* Stands for the function that KIWI_EMULATOR_HANG names: the call never returns, and signals end the process as
 * usual. */
static void hang(void) {
    for (;;) pause();
}

/* Finds the newest form that is not newer than the version asked for, or than the version that the driver claims. */
API int cuGetProcAddress_v2(const char *symbol, void **pfn, int version, unsigned long long flags,
                            int *status) {
    int driver = 0, best = -1, found = NO_SUCH_SYMBOL;
    const char *lacks = getenv("KIWI_EMULATOR_LACKS"); /* a driver without this function */
    (void)flags; /* per-thread default stream variants are not emulated */
    if (!symbol || !pfn) return INVALID_VALUE;
    if (lacks && strcmp(lacks, symbol) == 0) {
        *pfn = NULL;
        if (status) *status = NO_SUCH_SYMBOL;
        return NOT_FOUND;
    }
    cuDriverGetVersion(&driver);
    if (version > driver) version = driver;
    for (int i = 0; i < (int)(sizeof entries / sizeof *entries); i++) {
        if (strcmp(entries[i].name, symbol) != 0) continue;
        if (entries[i].since > version) {
            if (best < 0) found = VERSION_NOT_SUFFICIENT;
        } else if (best < 0 || entries[i].since > entries[best].since) {
            best = i;
            found = FOUND;
        }
    }
    *pfn = NULL;
    if (found != FOUND) found = look_up_name(symbol, version); /* also finds an older form, which is not emulated */
    if (found == FOUND) {
        const char *hangs = getenv("KIWI_EMULATOR_HANG");
        void (*address)(void) = best >= 0 ? entries[best].address : (void (*)(void))refuse;
        if (hangs && strcmp(hangs, symbol) == 0) address = hang;
        memcpy(pfn, &address, sizeof *pfn);
    }
    if (status) *status = found;
    return found == FOUND ? SUCCESS : NOT_FOUND;
}

/* The form of CUDA 11.3, without a status. */
API int cuGetProcAddress(const char *symbol, void **pfn, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(symbol, pfn, version, flags, NULL);
}

/* ---- names of results ---------------------------------------------------------------------------- */

static const struct {
    int code;
    const char *name; /* without "CUDA_" */
} results[] = {
    {0, "SUCCESS"}, {1, "ERROR_INVALID_VALUE"}, {2, "ERROR_OUT_OF_MEMORY"}, {3, "ERROR_NOT_INITIALIZED"},
    {4, "ERROR_DEINITIALIZED"}, {5, "ERROR_PROFILER_DISABLED"}, {6, "ERROR_PROFILER_NOT_INITIALIZED"},
    {7, "ERROR_PROFILER_ALREADY_STARTED"}, {8, "ERROR_PROFILER_ALREADY_STOPPED"},
    {34, "ERROR_STUB_LIBRARY"}, {36, "ERROR_CALL_REQUIRES_NEWER_DRIVER"}, {46, "ERROR_DEVICE_UNAVAILABLE"},
    {100, "ERROR_NO_DEVICE"}, {101, "ERROR_INVALID_DEVICE"}, {102, "ERROR_DEVICE_NOT_LICENSED"},
    {200, "ERROR_INVALID_IMAGE"}, {201, "ERROR_INVALID_CONTEXT"}, {202, "ERROR_CONTEXT_ALREADY_CURRENT"},
    {205, "ERROR_MAP_FAILED"}, {206, "ERROR_UNMAP_FAILED"}, {207, "ERROR_ARRAY_IS_MAPPED"},
    {208, "ERROR_ALREADY_MAPPED"}, {209, "ERROR_NO_BINARY_FOR_GPU"}, {210, "ERROR_ALREADY_ACQUIRED"},
    {211, "ERROR_NOT_MAPPED"}, {212, "ERROR_NOT_MAPPED_AS_ARRAY"}, {213, "ERROR_NOT_MAPPED_AS_POINTER"},
    {214, "ERROR_ECC_UNCORRECTABLE"}, {215, "ERROR_UNSUPPORTED_LIMIT"},
    {216, "ERROR_CONTEXT_ALREADY_IN_USE"}, {217, "ERROR_PEER_ACCESS_UNSUPPORTED"},
    {218, "ERROR_INVALID_PTX"}, {219, "ERROR_INVALID_GRAPHICS_CONTEXT"},
    {220, "ERROR_NVLINK_UNCORRECTABLE"}, {221, "ERROR_JIT_COMPILER_NOT_FOUND"},
    {222, "ERROR_UNSUPPORTED_PTX_VERSION"}, {223, "ERROR_JIT_COMPILATION_DISABLED"},
    {224, "ERROR_UNSUPPORTED_EXEC_AFFINITY"}, {225, "ERROR_UNSUPPORTED_DEVSIDE_SYNC"},
    {226, "ERROR_CONTAINED"}, {300, "ERROR_INVALID_SOURCE"}, {301, "ERROR_FILE_NOT_FOUND"},
    {302, "ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND"}, {303, "ERROR_SHARED_OBJECT_INIT_FAILED"},
    {304, "ERROR_OPERATING_SYSTEM"}, {400, "ERROR_INVALID_HANDLE"}, {401, "ERROR_ILLEGAL_STATE"},
    {402, "ERROR_LOSSY_QUERY"}, {500, "ERROR_NOT_FOUND"}, {600, "ERROR_NOT_READY"},
    {700, "ERROR_ILLEGAL_ADDRESS"}, {701, "ERROR_LAUNCH_OUT_OF_RESOURCES"}, {702, "ERROR_LAUNCH_TIMEOUT"},
    {703, "ERROR_LAUNCH_INCOMPATIBLE_TEXTURING"}, {704, "ERROR_PEER_ACCESS_ALREADY_ENABLED"},
    {705, "ERROR_PEER_ACCESS_NOT_ENABLED"}, {708, "ERROR_PRIMARY_CONTEXT_ACTIVE"},
    {709, "ERROR_CONTEXT_IS_DESTROYED"}, {710, "ERROR_ASSERT"}, {711, "ERROR_TOO_MANY_PEERS"},
    {712, "ERROR_HOST_MEMORY_ALREADY_REGISTERED"}, {713, "ERROR_HOST_MEMORY_NOT_REGISTERED"},
    {714, "ERROR_HARDWARE_STACK_ERROR"}, {715, "ERROR_ILLEGAL_INSTRUCTION"},
    {716, "ERROR_MISALIGNED_ADDRESS"}, {717, "ERROR_INVALID_ADDRESS_SPACE"}, {718, "ERROR_INVALID_PC"},
    {719, "ERROR_LAUNCH_FAILED"}, {720, "ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"},
    {721, "ERROR_TENSOR_MEMORY_LEAK"}, {800, "ERROR_NOT_PERMITTED"}, {801, "ERROR_NOT_SUPPORTED"},
    {802, "ERROR_SYSTEM_NOT_READY"}, {803, "ERROR_SYSTEM_DRIVER_MISMATCH"},
    {804, "ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"}, {805, "ERROR_MPS_CONNECTION_FAILED"},
    {806, "ERROR_MPS_RPC_FAILURE"}, {807, "ERROR_MPS_SERVER_NOT_READY"},
    {808, "ERROR_MPS_MAX_CLIENTS_REACHED"}, {809, "ERROR_MPS_MAX_CONNECTIONS_REACHED"},
    {810, "ERROR_MPS_CLIENT_TERMINATED"}, {811, "ERROR_CDP_NOT_SUPPORTED"},
    {812, "ERROR_CDP_VERSION_MISMATCH"}, {900, "ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {901, "ERROR_STREAM_CAPTURE_INVALIDATED"}, {902, "ERROR_STREAM_CAPTURE_MERGE"},
    {903, "ERROR_STREAM_CAPTURE_UNMATCHED"}, {904, "ERROR_STREAM_CAPTURE_UNJOINED"},
    {905, "ERROR_STREAM_CAPTURE_ISOLATION"}, {906, "ERROR_STREAM_CAPTURE_IMPLICIT"},
    {907, "ERROR_CAPTURED_EVENT"}, {908, "ERROR_STREAM_CAPTURE_WRONG_THREAD"}, {909, "ERROR_TIMEOUT"},
    {910, "ERROR_GRAPH_EXEC_UPDATE_FAILURE"}, {911, "ERROR_EXTERNAL_DEVICE"},
    {912, "ERROR_INVALID_CLUSTER_SIZE"}, {913, "ERROR_FUNCTION_NOT_LOADED"},
    {914, "ERROR_INVALID_RESOURCE_TYPE"}, {915, "ERROR_INVALID_RESOURCE_CONFIGURATION"},
    {916, "ERROR_KEY_ROTATION"}, {917, "ERROR_STREAM_DETACHED"}, {999, "ERROR_UNKNOWN"},
};
#define RESULT_COUNT (sizeof results / sizeof *results)

static char full[RESULT_COUNT][64], plain[RESULT_COUNT][64];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void spell(void) { /* CUDA_ERROR_OUT_OF_MEMORY, "out of memory" */
    for (size_t i = 0; i < RESULT_COUNT; i++) {
        const char *name = results[i].name;
        snprintf(full[i], sizeof full[i], "CUDA_%s", name);
        if (strncmp(name, "ERROR_", 6) == 0) name += 6;
        else name = "no error";
        for (size_t k = 0; name[k] && k + 1 < sizeof plain[i]; k++)
            plain[i][k] = name[k] == '_' ? ' ' : (char)tolower((unsigned char)name[k]);
    }
}

static int look_up(int code, const char **out, char (*texts)[64]) {
    if (!out) return INVALID_VALUE;
    pthread_once(&once, spell);
    *out = NULL;
    for (size_t i = 0; i < RESULT_COUNT; i++) {
        if (results[i].code == code) *out = texts[i];
    }
    return *out ? SUCCESS : INVALID_VALUE;
}

API int cuGetErrorName(int error, const char **text) { return look_up(error, text, full); }
API int cuGetErrorString(int error, const char **text) { return look_up(error, text, plain); }
