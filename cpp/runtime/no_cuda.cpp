// The CUDA half of the seam in builds without it.
#include "cpp/runtime/backend.h"

namespace imp {

CudaStatus cuda_status() { return {false, false, "this build has no CUDA code (IMP_CUDA=OFF)"}; }

}  // namespace imp
