// Marks small functions that CUDA kernels call too. C++20-clean.
#pragma once

#ifdef __CUDACC__
#define IMP_HOST_DEVICE __host__ __device__
#else
#define IMP_HOST_DEVICE
#endif
