/* The toolkit's stub of libcuda, which is there to link against: each function answers CUDA_ERROR_STUB_LIBRARY. */
int cuInit(unsigned flags) { return (void)flags, 34; }
int cuDriverGetVersion(int *version) { return (void)version, 34; }
int cuLaunchKernel(void) { return 34; }
