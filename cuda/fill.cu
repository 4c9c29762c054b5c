// Synthetic weights.
#include "cpp/model/synthetic_words.h"
#include "cuda/check.h"
#include "cuda/common/math.cuh"
#include "cuda/run.h"
#include "cuda/weights.h"

namespace imp::cuda {
namespace {

__global__ void synthetic_kernel(DType type, std::uint64_t seed, float amplitude,
                                 std::uint64_t first, std::uint64_t n, std::uint32_t* to) {
  const std::uint64_t step = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (auto i = static_cast<std::uint64_t>(global_thread()); i < n; i += step)
    to[i] = synthetic_word(type, seed, amplitude, first + i);
}

}  // namespace

void fill_synthetic(const Weight& shape, std::size_t first, std::size_t words, std::byte* to,
                    cudaStream_t stream) {
  constexpr unsigned blocks = 2048;
  synthetic_kernel<<<blocks, block_threads, 0, stream>>>(
      shape.dtype, shape.seed, synthetic_amplitude(shape.cols), first, words,
      reinterpret_cast<std::uint32_t*>(to));
  check_launch("fill_synthetic");
}

}  // namespace imp::cuda
