// Keys and values as the cache stores them: 4 bytes are fp32, 2 bytes f16 or bf16. Kernels that
// read are compiled by size; which of the two-byte types it is they ask while they run.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "cpp/quant/quant.h"

namespace imp::cuda {

// The keys or the values of a layer, as one array.
struct Cells {
  std::byte* data = nullptr;
  DType type = DType::f32;

  __host__ __device__ int bytes() const { return type == DType::f32 ? 4 : 2; }
  __host__ __device__ Cells from(std::int64_t i) const { return {data + i * bytes(), type}; }

#ifdef __CUDACC__
  __device__ __forceinline__ static float decode(std::uint32_t bits, bool bf16) {
    return bf16 ? __uint_as_float(bits << 16)
                : __half2float(__ushort_as_half(static_cast<std::uint16_t>(bits)));
  }

  template <int Bytes>
  __device__ __forceinline__ float load(std::int64_t i) const {
    if constexpr (Bytes == 4) return reinterpret_cast<const float*>(data)[i];
    return decode(reinterpret_cast<const std::uint16_t*>(data)[i], type == DType::bf16);
  }

  // Cells i .. i + 3; i a multiple of 4.
  template <int Bytes>
  __device__ __forceinline__ float4 load4(std::int64_t i) const {
    if constexpr (Bytes == 4) return *reinterpret_cast<const float4*>(data + 4 * i);
    const uint2 v = *reinterpret_cast<const uint2*>(data + 2 * i);
    const bool bf16 = type == DType::bf16;
    return {decode(v.x & 0xffff, bf16), decode(v.x >> 16, bf16), decode(v.y & 0xffff, bf16),
            decode(v.y >> 16, bf16)};
  }

  // Rounds to the nearest, of two the even one, as the host does.
  __device__ __forceinline__ void store(std::int64_t i, float x) const {
    if (type == DType::f32)
      reinterpret_cast<float*>(data)[i] = x;
    else if (type == DType::f16)
      reinterpret_cast<__half*>(data)[i] = __float2half_rn(x);
    else
      reinterpret_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(x);
  }
#endif
};

// f<key bytes, value bytes>()
template <class F>
void with_cell_bytes(const Cells& keys, const Cells& values, F f) {
  if (keys.bytes() == 4)
    return values.bytes() == 4 ? f.template operator()<4, 4>() : f.template operator()<4, 2>();
  return values.bytes() == 4 ? f.template operator()<2, 4>() : f.template operator()<2, 2>();
}

}  // namespace imp::cuda
