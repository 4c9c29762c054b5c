// The kernel table for x86-64 with AVX-512 F, BW, VL and DQ.
#if defined(__x86_64__)
#define IMP_VEC_AVX512
#include "cpp/cpu/kernels/table.h"

namespace imp::cpu {
const Kernels avx512_kernels = IMP_KERNEL_TABLE("avx512");
}  // namespace imp::cpu
#endif
