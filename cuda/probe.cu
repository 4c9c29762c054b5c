// An empty kernel that is asked what of this build's code the current device loads.
#include "cuda/device.h"

namespace imp::cuda {
namespace {

__global__ void probe() {}

}  // namespace

int code_version() {
  cudaFuncAttributes attributes;
  const bool ok = cudaFuncGetAttributes(&attributes, probe) == cudaSuccess;
  cudaGetLastError();
  return ok ? attributes.ptxVersion : 0;
}

}  // namespace imp::cuda
