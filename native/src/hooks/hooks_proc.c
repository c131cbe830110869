/* cuGetProcAddress, through which every modern program finds the driver's functions, and what errors are called. */
#include "hooks/hooks.h"

#include "hooks/calls.h"

/* A null pointer is the driver's answer for "not there", with or without an error. */
static CUresult answered(CUresult result, const char *name, void **address, int version, cuuint64_t flags) {
    if (result == CUDA_SUCCESS && name && address && *address && !kp_disabled())
        *address = kp_wrapper_of_call(name, *address, version, flags);
    return result;
}

HOOK(COUNTED, cuGetProcAddress, (const char *name, void **address, int version, cuuint64_t flags),
     answered(real(name, address, version, flags), name, address, version, flags))
HOOK(COUNTED, cuGetProcAddress_v2,
     (const char *name, void **address, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *found),
     answered(real(name, address, version, flags, found), name, address, version, flags))

/* Libraries ask for the text of an error that they have just had, at a shut gate, too; some use it without looking whether
 * they got one. */
static bool interrupted(CUresult error, const char **text, const char *says) {
    if (error == KP_INTERRUPTED && text) *text = says;
    return error == KP_INTERRUPTED && text;
}

KP_API CUresult cuGetErrorName(CUresult error, const char **text) {
    if (interrupted(error, text, "CUDA_ERROR_DEVICE_UNAVAILABLE")) return CUDA_SUCCESS;
    DRIVER(cuGetErrorName);
    CUresult result;
    COUNTED(result, real(error, text));
    return result;
}

KP_API CUresult cuGetErrorString(CUresult error, const char **text) {
    if (interrupted(error, text, "CUDA-capable device(s) is/are busy or unavailable")) return CUDA_SUCCESS;
    DRIVER(cuGetErrorString);
    CUresult result;
    COUNTED(result, real(error, text));
    return result;
}
