"""Code that tests send to workers more than once."""

VMM = (
    "prop = driver.CUmemAllocationProp()\n"
    "prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED\n"
    "prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE\n"
    "prop.location.id = 0\n"
    "desc = driver.CUmemAccessDesc(); desc.location = prop.location\n"
    "desc.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE\n"
    "least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM\n"
    "g = ck(driver.cuMemGetAllocationGranularity(prop, least)); size = 8 * g\n"
)
