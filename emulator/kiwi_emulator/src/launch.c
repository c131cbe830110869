/* Modules that name built-in kernels, and their launches.
 *
 * An image is the text "kiwi-emulated-module", or PTX whose entries are all built in; every such module holds
 * all the kernels below. No other image can be loaded: real code needs a real GPU.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emu.h"

#define IMAGE "kiwi-emulated-module"
#define PARAMS_MAX 4
#define SPIN_SLICE_NS 5000000ull

struct kernel {
    const char *name;
    int params;
    unsigned char size[PARAMS_MAX];
    CUresult (*run)(const uint64_t *p);
};

/* Checks an array parameter of a kernel, which gets its parameters widened to 64 bits. */
static CUresult words(uint64_t ptr, uint64_t n, uint64_t each, bool write, void *out) {
    if (n > KE_DEVICE_SPAN / each || ptr % each) return CUDA_ERROR_ILLEGAL_ADDRESS;
    enum ke_place where = ke_place(ptr, n * each, write);
    bool pinned = false;
    if (where == KE_PLACE_HOST) {
        ke_mu_lock();
        pinned = ke_host_pinned((void *)(uintptr_t)ptr, n * each);
        ke_mu_unlock();
    }
    *(void **)out = (void *)(uintptr_t)ptr;
    return where == KE_PLACE_DEVICE || pinned ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

static CUresult fill_u32(const uint64_t *p) { /* x[i] = value */
    uint32_t *x;
    CUresult rc = words(p[0], p[1], 4, true, &x);
    for (uint64_t i = 0; rc == CUDA_SUCCESS && i < p[1]; i++) x[i] = (uint32_t)p[2];
    return rc;
}

static CUresult add_u32(const uint64_t *p) { /* x[i] += value */
    uint32_t *x;
    CUresult rc = words(p[0], p[1], 4, true, &x);
    for (uint64_t i = 0; rc == CUDA_SUCCESS && i < p[1]; i++) x[i] += (uint32_t)p[2];
    return rc;
}

static CUresult xorshift_u32(const uint64_t *p) { /* x[i] = a random number from position and seed */
    uint32_t *x;
    CUresult rc = words(p[0], p[1], 4, true, &x);
    for (uint64_t i = 0; rc == CUDA_SUCCESS && i < p[1]; i++) {
        uint32_t v = (uint32_t)p[2] ^ (uint32_t)(i * 2654435761u);
        v ^= v << 13;
        v ^= v >> 17;
        v ^= v << 5;
        x[i] = v;
    }
    return rc;
}

static CUresult checksum_u64(const uint64_t *p) { /* *out = sum of x[i] * (i + 1), modulo 2^64 */
    uint32_t *x;
    uint64_t *out, sum = 0;
    CUresult rc = words(p[0], p[1], 4, false, &x);
    if (rc == CUDA_SUCCESS) rc = words(p[2], 1, 8, true, &out);
    if (rc != CUDA_SUCCESS) return rc;
    for (uint64_t i = 0; i < p[1]; i++) sum += (uint64_t)x[i] * (i + 1);
    *out = sum;
    return rc;
}

static CUresult spin_ns(const uint64_t *p) { /* keeps the stream busy */
    uint64_t start = ke_now_ns();
    for (;;) {
        uint64_t gone = ke_now_ns() - start;
        if (gone >= p[0]) return CUDA_SUCCESS;
        ke_sleep_ns(p[0] - gone < SPIN_SLICE_NS ? p[0] - gone : SPIN_SLICE_NS);
    }
}

static const struct kernel kernels[] = {
    {"fill_u32", 3, {8, 8, 4}, fill_u32},         {"add_u32", 3, {8, 8, 4}, add_u32},
    {"xorshift_u32", 3, {8, 8, 4}, xorshift_u32}, {"checksum_u64", 3, {8, 8, 8}, checksum_u64},
    {"spin_ns", 1, {8}, spin_ns},
};
#define KERNEL_COUNT (sizeof kernels / sizeof *kernels)

/* A CUfunction or CUkernel handle. */
struct function {
    const struct kernel *kernel;
    struct module *module;
};

struct module { /* a CUmodule or CUlibrary */
    bool alive;
    struct function functions[KERNEL_COUNT];
    struct module *next;
};
static struct module *modules; /* kept when unloaded: stale handles get an error */

static struct module *module_of(const void *handle) {
    for (struct module *m = modules; m; m = m->next) {
        if (m == handle) return m->alive ? m : NULL;
    }
    return NULL;
}

static struct function *function_of(const void *handle) {
    for (struct module *m = modules; m; m = m->next) {
        const char *first = (const char *)m->functions, *h = handle;
        if (h < first || h >= first + sizeof m->functions) continue;
        return m->alive ? (struct function *)handle : NULL;
    }
    return NULL;
}

/* Returns whether all entries of the PTX are built in; ignores the code itself. */
static bool known_ptx(const char *image) {
    const char *at = image;
    size_t entries = 0;
    if (strncmp(image, ".version", strlen(".version")) != 0) return false;
    while ((at = strstr(at, ".entry "))) {
        at += strlen(".entry ");
        size_t n = strcspn(at, "( \n"), i = 0;
        while (i < KERNEL_COUNT && (strlen(kernels[i].name) != n || strncmp(kernels[i].name, at, n) != 0)) i++;
        if (i == KERNEL_COUNT) return false;
        entries++;
    }
    return entries != 0;
}

static CUresult load(void **out, const void *image, bool library) {
    CUcontext ctx;
    if (!out || !image) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = library ? CUDA_SUCCESS : ke_current(&ctx);
    if (rc != CUDA_SUCCESS) return rc;
    if (strncmp(image, IMAGE, strlen(IMAGE)) != 0 && !known_ptx(image)) return CUDA_ERROR_INVALID_IMAGE;
    struct module *m = calloc(1, sizeof *m);
    if (!m) return CUDA_ERROR_OUT_OF_MEMORY;
    m->alive = true;
    for (size_t i = 0; i < KERNEL_COUNT; i++) m->functions[i] = (struct function){&kernels[i], m};
    ke_mu_lock();
    m->next = modules;
    modules = m;
    ke_mu_unlock();
    *out = m;
    return CUDA_SUCCESS;
}
KE_FORWARD(cuModuleLoadData, (CUmodule *module, const void *image), load((void **)module, image, false))
KE_API CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions,
                                   CUjit_option *options, void **optionValues) {
    (void)numOptions, (void)options, (void)optionValues;
    KE_CALL(load((void **)module, image, false));
}
KE_FORWARD(cuModuleLoadFatBinary, (CUmodule *module, const void *fatCubin), load((void **)module, fatCubin, false))
KE_API CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions,
                                  void **jitOptionsValues, unsigned int numJitOptions,
                                  CUlibraryOption *libraryOptions, void **libraryOptionValues,
                                  unsigned int numLibraryOptions) {
    (void)jitOptions, (void)jitOptionsValues, (void)numJitOptions;
    (void)libraryOptions, (void)libraryOptionValues, (void)numLibraryOptions;
    KE_CALL(load((void **)library, code, true));
}

static CUresult unload(void *handle) {
    ke_wait_context(NULL);
    ke_mu_lock();
    struct module *m = module_of(handle);
    if (m) m->alive = false;
    ke_mu_unlock();
    return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
KE_FORWARD(cuModuleUnload, (CUmodule hmod), unload(hmod))
KE_FORWARD(cuLibraryUnload, (CUlibrary library), unload(library))

static CUresult find(void **out, void *handle, const char *name) {
    if (!out || !name) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = CUDA_ERROR_NOT_FOUND;
    ke_mu_lock();
    struct module *m = module_of(handle);
    if (!m) rc = CUDA_ERROR_INVALID_HANDLE;
    for (size_t i = 0; m && i < KERNEL_COUNT; i++) {
        if (strcmp(kernels[i].name, name) != 0) continue;
        *out = &m->functions[i];
        rc = CUDA_SUCCESS;
    }
    ke_mu_unlock();
    return rc;
}
KE_FORWARD(cuModuleGetFunction, (CUfunction *hfunc, CUmodule hmod, const char *name), find((void **)hfunc, hmod, name))
KE_FORWARD(cuLibraryGetKernel, (CUkernel *pKernel, CUlibrary library, const char *name),
           find((void **)pKernel, library, name))

static CUresult same_handle(void **out, void *handle) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = handle;
    ke_mu_lock();
    bool known = function_of(handle) || module_of(handle);
    ke_mu_unlock();
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
KE_FORWARD(cuKernelGetFunction, (CUfunction *pFunc, CUkernel kernel), same_handle((void **)pFunc, kernel))
KE_FORWARD(cuLibraryGetModule, (CUmodule *pMod, CUlibrary library), same_handle((void **)pMod, library))

static CUresult owner(void **out, void *handle) {
    ke_mu_lock();
    struct function *f = function_of(handle);
    if (f && out) *out = f->module;
    ke_mu_unlock();
    return f && out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
KE_FORWARD(cuFuncGetModule, (CUmodule *hmod, CUfunction hfunc), owner((void **)hmod, hfunc))
KE_FORWARD(cuKernelGetLibrary, (CUlibrary *pLib, CUkernel kernel), owner((void **)pLib, kernel))

static CUresult count(unsigned *out, void *handle) {
    ke_mu_lock();
    struct module *m = module_of(handle);
    ke_mu_unlock();
    if (!m || !out) return CUDA_ERROR_INVALID_VALUE;
    *out = KERNEL_COUNT;
    return CUDA_SUCCESS;
}
KE_FORWARD(cuModuleGetFunctionCount, (unsigned *n, CUmodule mod), count(n, mod))
KE_FORWARD(cuLibraryGetKernelCount, (unsigned *n, CUlibrary lib), count(n, lib))

static CUresult enumerate(void **out, unsigned n, void *handle) {
    ke_mu_lock();
    struct module *m = module_of(handle);
    for (unsigned i = 0; m && out && i < n && i < KERNEL_COUNT; i++) out[i] = &m->functions[i];
    ke_mu_unlock();
    return m && out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
KE_FORWARD(cuModuleEnumerateFunctions, (CUfunction *functions, unsigned n, CUmodule mod),
           enumerate((void **)functions, n, mod))
KE_FORWARD(cuLibraryEnumerateKernels, (CUkernel *list, unsigned n, CUlibrary lib), enumerate((void **)list, n, lib))

/* ---- queries ---------------------------------------------------------------------------------------- */

static CUresult name_of(const char **out, const void *handle) {
    ke_mu_lock();
    struct function *f = function_of(handle);
    ke_mu_unlock();
    if (!f || !out) return CUDA_ERROR_INVALID_VALUE;
    *out = f->kernel->name;
    return CUDA_SUCCESS;
}
KE_FORWARD(cuFuncGetName, (const char **name, CUfunction hfunc), name_of(name, hfunc))
KE_FORWARD(cuKernelGetName, (const char **name, CUkernel hfunc), name_of(name, hfunc))

static CUresult attribute(int *out, int what, const void *handle) {
    static const int values[] = {1024, 0, 0, 0, 32, 90, 90, 0, 49152, -1, 0, 0, 0, 0, 0, 0};
    ke_mu_lock();
    struct function *f = function_of(handle);
    ke_mu_unlock();
    if (!f) return CUDA_ERROR_INVALID_HANDLE;
    if (!out || what < 0 || (size_t)what >= sizeof values / sizeof *values) return CUDA_ERROR_INVALID_VALUE;
    *out = values[what];
    return CUDA_SUCCESS;
}
KE_FORWARD(cuFuncGetAttribute, (int *pi, CUfunction_attribute attrib, CUfunction hfunc),
           attribute(pi, (int)attrib, hfunc))
KE_API CUresult cuKernelGetAttribute(int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev) {
    (void)dev;
    KE_CALL(attribute(pi, (int)attrib, kernel));
}

static CUresult param_info(const void *handle, size_t index, size_t *offset, size_t *size) {
    ke_mu_lock();
    struct function *f = function_of(handle);
    ke_mu_unlock();
    if (!f || !offset || index >= (size_t)f->kernel->params) return CUDA_ERROR_INVALID_VALUE;
    *offset = index * 8; /* no parameter is wider, and each is aligned to its size */
    if (size) *size = f->kernel->size[index];
    return CUDA_SUCCESS;
}
KE_FORWARD(cuFuncGetParamInfo, (CUfunction func, size_t i, size_t *offset, size_t *size),
           param_info(func, i, offset, size))
KE_FORWARD(cuKernelGetParamInfo, (CUkernel kernel, size_t i, size_t *offset, size_t *size),
           param_info(kernel, i, offset, size))

KE_ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor,
         (int *blocks, CUfunction handle, int block_size, size_t shared), (blocks, handle, block_size, shared)) {
    (void)shared;
    int ignored;
    CUresult rc = attribute(&ignored, 0, handle);
    if (rc == CUDA_SUCCESS && (!blocks || block_size <= 0)) rc = CUDA_ERROR_INVALID_VALUE;
    if (rc == CUDA_SUCCESS) *blocks = block_size > 1024 ? 0 : 2048 / block_size;
    return rc;
}

/* ---- launches --------------------------------------------------------------------------------------- */

struct launch {
    const struct kernel *kernel;
    uint64_t params[PARAMS_MAX];
};

static CUresult run_launch(CUcontext ctx, void *arg) {
    (void)ctx;
    struct launch *l = arg;
    return l->kernel->run(l->params);
}

/* Collects the parameters, from an array of pointers or from one packed buffer. */
static CUresult gather(const struct kernel *k, void **params, void **extra, uint64_t *out) {
    const char *packed = NULL;
    for (; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) packed = extra[1];
    }
    if (!params && !packed) return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < k->params; i++) {
        const void *from = packed ? packed + i * 8 : params[i];
        if (!from) return CUDA_ERROR_INVALID_VALUE;
        out[i] = 0;
        memcpy(&out[i], from, k->size[i]); /* little-endian, like every host with a GPU */
    }
    return CUDA_SUCCESS;
}

CUresult ke_launch_work(CUfunction handle, const unsigned *dims, void **params, void **extra,
                        struct ke_work *out) {
    struct launch l;
    ke_mu_lock();
    struct function *f = function_of(handle);
    ke_mu_unlock();
    if (!f) return CUDA_ERROR_INVALID_HANDLE;
    for (int i = 0; i < 6; i++) {
        if (dims[i] == 0) return CUDA_ERROR_INVALID_VALUE;
    }
    if ((uint64_t)dims[3] * dims[4] * dims[5] > 1024) return CUDA_ERROR_INVALID_VALUE;
    l.kernel = f->kernel;
    CUresult rc = gather(l.kernel, params, extra, l.params);
    if (l.kernel->params < PARAMS_MAX) l.params[l.kernel->params] = dims[0];
    if (rc == CUDA_SUCCESS) *out = ke_work(run_launch, &l, sizeof l, KE_JOB_KERNEL);
    return rc;
}

static CUresult launch(CUfunction f, const unsigned *dims, CUstream stream, void **params, void **extra) {
    CUstream s;
    struct ke_work work;
    CUresult rc = ke_stream_resolve(stream, &s);
    if (rc == CUDA_SUCCESS) rc = ke_launch_work(f, dims, params, extra, &work);
    return rc == CUDA_SUCCESS ? ke_submit(s, work.fn, work.arg, sizeof(struct launch), work.flags) : rc;
}

KE_API CUresult cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz,
                               unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,
                               CUstream hStream, void **kernelParams, void **extra) {
    (void)shared;
    const unsigned dims[6] = {gx, gy, gz, bx, by, bz};
    KE_CALL(launch(f, dims, hStream, kernelParams, extra));
}
KE_API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz,
                                          unsigned int bx, unsigned int by, unsigned int bz,
                                          unsigned int shared, CUstream hStream, void **kernelParams) {
    (void)shared;
    const unsigned dims[6] = {gx, gy, gz, bx, by, bz};
    KE_CALL(launch(f, dims, hStream, kernelParams, NULL));
}
KE_API CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **kernelParams, void **extra) {
    if (!c) return CUDA_ERROR_INVALID_VALUE;
    const unsigned dims[6] = {c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ};
    KE_CALL(launch(f, dims, c->hStream, kernelParams, extra));
}
