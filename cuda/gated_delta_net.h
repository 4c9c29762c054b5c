// What the kernels of a whole delta-net share: decode steps at the released shape, in one launch.
#pragma once

#include <cstdint>

#include "cpp/ops/act.h"
#include "cuda/common/math.cuh"
#include "cuda/context.h"

namespace imp::cuda {

namespace delta_net {
inline constexpr int dim = 128, taps = 4;  // of a head, of the convolution
inline constexpr int group = 3;            // value heads on a key head
}  // namespace delta_net

struct NetArgs {
  StepView step;
  const float *x, *z, *alpha, *b;     // [T, channels], [T, value_heads * dim], [T, value_heads] * 2
  const float *conv, *a, *dt, *norm;  // [taps, channels], [value_heads] twice, [dim]
  float* y;                           // [T, value_heads * dim]
  std::int64_t channels, conv_state, delta_state;
  int key_heads, value_heads;
  float eps;
  Act act;
};

#ifdef __CUDACC__

// One channel of the convolution over a chunk of one row.
struct Channel {
  float w[delta_net::taps], past[delta_net::taps - 1], x;
  __device__ void load_past(const NetArgs& a, const float* tail, std::int64_t channel) {
#pragma unroll
    for (int j = 0; j < delta_net::taps; ++j) w[j] = a.conv[j * a.channels + channel];
#pragma unroll
    for (int j = 0; j < delta_net::taps - 1; ++j) past[j] = tail[j * a.channels + channel];
  }
  __device__ float result() const {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < delta_net::taps - 1; ++j) sum = fmaf(w[j], past[j], sum);
    return silu(fmaf(w[delta_net::taps - 1], x, sum));
  }
  __device__ void store_past(const NetArgs& a, float* tail, std::int64_t channel) const {
#pragma unroll
    for (int j = 0; j < delta_net::taps - 1; ++j)
      tail[j * a.channels + channel] = j + 1 < delta_net::taps - 1 ? past[j + 1] : x;
  }
};

#endif

// Streams the states of many sequences through shared memory; for chunks of one row. Whether the
// device has the memory, and states lie where bulk copies reach them.
bool has_gated_delta_ring(const NetArgs&);
void gated_delta_ring(const NetArgs&, std::int64_t chunks, cudaStream_t);

}  // namespace imp::cuda
