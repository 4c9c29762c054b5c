// Constant values, for poisoning and clearing sequence memory.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/common/math.cuh"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

__global__ void fill_kernel(float* p, std::int64_t n, float value) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = global_thread(); i < n; i += step) p[i] = value;
}

}  // namespace

void fill_floats(float* p, std::int64_t n, float value, cudaStream_t stream) {
  constexpr std::int64_t most_blocks = 4096;
  if (n == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(most_blocks, blocks_for(n)));
  fill_kernel<<<blocks, block_threads, 0, stream>>>(p, n, value);
  check_launch("fill");
}

}  // namespace imp::cuda
