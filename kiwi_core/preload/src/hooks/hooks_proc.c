/* cuGetProcAddress, through which every modern program finds the driver's functions. */
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
