// An empty kernel that is asked whether the current device can load this build's code.
#include "cuda/device.h"

namespace imp::cuda {
namespace {

__global__ void probe() {}

}  // namespace

bool code_loads() {
  cudaFuncAttributes attributes;
  const bool ok = cudaFuncGetAttributes(&attributes, probe) == cudaSuccess;
  cudaGetLastError();
  return ok;
}

}  // namespace imp::cuda
