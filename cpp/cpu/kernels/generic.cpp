// The kernel table for any processor.
#define IMP_VEC_GENERIC
#include "cpp/cpu/kernels/table.h"

namespace imp::cpu {

const Kernels generic_kernels = IMP_KERNEL_TABLE("generic");

}  // namespace imp::cpu
