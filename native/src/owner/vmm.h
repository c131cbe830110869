/* Memory that the program takes by the driver's virtual memory management: what it calls instead of the driver.
 *
 * An object of cuMemCreate on the owned GPU moves like other owned memory, wherever the program maps it. It *stays* in
 * the GPU from the moment when others may reach it past the gate. */
#ifndef KP_VMM_H
#define KP_VMM_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>

/* Returns whether such memory is Kiwi's to own. */
bool kp_vmm_owns(const CUmemAllocationProp *prop);

/* Each does what the driver's call of that name does; a handle that is none of ours goes to the driver. Release, Unmap,
 * AddressFree and the question for properties are not gated: they wait for a pager that is at work. */
CUresult kp_vmm_create(CUmemGenericAllocationHandle *name, size_t bytes, const CUmemAllocationProp *prop,
                       unsigned long long flags);
CUresult kp_vmm_release(CUmemGenericAllocationHandle name);
CUresult kp_vmm_map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle name,
                    unsigned long long flags);
CUresult kp_vmm_unmap(CUdeviceptr at, size_t bytes);
CUresult kp_vmm_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count);
CUresult kp_vmm_retain(CUmemGenericAllocationHandle *name, void *address);
CUresult kp_vmm_properties(CUmemAllocationProp *prop, CUmemGenericAllocationHandle name);
CUresult kp_vmm_address_free(CUdeviceptr at, size_t bytes);

/* Returns the driver's handle of a name, or the argument if it is none. For calls inside the gate. */
CUmemGenericAllocationHandle kp_vmm_handle(CUmemGenericAllocationHandle name);
bool kp_vmm_is_ours(CUmemGenericAllocationHandle handle);

/* ---- stay.c: after a call by which others reach the memory; for calls inside the gate ---- */
void kp_stays_named(CUmemGenericAllocationHandle name);
void kp_stays_at(CUdeviceptr at, size_t bytes); /* all that is ours there, of cuMemAlloc, too */

#endif
