// The kernel table for x86-64 with AVX2, FMA and F16C.
#if defined(__x86_64__)
#define IMP_VEC_AVX2
#include "cpp/cpu/kernels/table.h"

namespace imp::cpu {
const Kernels avx2_kernels = IMP_KERNEL_TABLE("avx2");
}  // namespace imp::cpu
#endif
