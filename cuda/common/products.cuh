// Products of 16 stored rows and 8 activation rows on tensor cores, 32 columns at a time, without
// shared memory: a lane loads a unit of 8 columns of two weight rows and of one activation row, and
// those are its operands, since the columns of a product may come in any order.
//
// With g = lane / 4 and c = lane % 4 a lane's units are the c-th of rows g and g + 8 and of
// activation row g; its sums are those of mma_bf16. A Products<F> has X, an activation unit as
// operands; split(a, b), which makes it; and add(sums, raw, x), sums += the products of 32 columns.
#pragma once

#include "cuda/common/formats.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/reduce.cuh"

namespace imp::cuda {

inline constexpr int tile_rows = 16, tile_tokens = 8, group_units = 4;
inline constexpr int group_columns = group_units * unit_elems;

// Weights whose codes are bf16 numbers: activations are sums of two bf16.
struct Bf16Operands {
  struct X {
    SplitPair pair[4];
  };
  static __device__ __forceinline__ X split(const float4& a, const float4& b) {
    return {
        {split_pair(a.x, a.y), split_pair(a.z, a.w), split_pair(b.x, b.y), split_pair(b.z, b.w)}};
  }
  // upper, lower: units of rows g and g + 8
  static __device__ __forceinline__ void multiply(float (&sums)[4], const std::uint32_t (&upper)[4],
                                                  const std::uint32_t (&lower)[4], const X& x) {
    const std::uint32_t first[4] = {upper[0], lower[0], upper[1], lower[1]},
                        second[4] = {upper[2], lower[2], upper[3], lower[3]};
    mma_bf16(sums, first, {x.pair[0].lo, x.pair[1].lo});
    mma_bf16(sums, second, {x.pair[2].lo, x.pair[3].lo});
    mma_bf16(sums, first, {x.pair[0].hi, x.pair[1].hi});
    mma_bf16(sums, second, {x.pair[2].hi, x.pair[3].hi});
  }
};

template <class F>
struct Products;

template <>
struct Products<Bf16> : Bf16Operands {
  static __device__ __forceinline__ void add(float (&sums)[4], const uint4 (&raw)[2], const X& x) {
    multiply(sums, {raw[0].x, raw[0].y, raw[0].z, raw[0].w},
             {raw[1].x, raw[1].y, raw[1].z, raw[1].w}, x);
  }
};

template <>
struct Products<Q8> : Bf16Operands {
  static __device__ __forceinline__ void add(float (&sums)[4], const Q8::Raw (&raw)[2],
                                             const X& x) {
    std::uint32_t words[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float v[unit_elems];
      Q8::decode(raw[r], v);
#pragma unroll
      for (int i = 0; i < 4; ++i)  // the upper halves say all
        words[r][i] = __byte_perm(__float_as_uint(v[2 * i]), __float_as_uint(v[2 * i + 1]), 0x7632);
    }
    float block[4] = {};
    multiply(block, words[0], words[1], x);
    const float upper = Q8::factor(raw[0]), lower = Q8::factor(raw[1]);
    sums[0] = fmaf(upper, block[0], sums[0]);
    sums[1] = fmaf(upper, block[1], sums[1]);
    sums[2] = fmaf(lower, block[2], sums[2]);
    sums[3] = fmaf(lower, block[3], sums[3]);
  }
};

// Both sides are sums of two tf32; the product of the lower parts is left out. Tensor cores cut off
// what an addition does not keep, so they add only the columns of one group.
template <>
struct Products<F32> {
  struct X {
    SplitTf32 v[unit_elems];
  };
  static __device__ __forceinline__ X split(const float4& a, const float4& b) {
    return {{split_tf32(a.x), split_tf32(a.y), split_tf32(a.z), split_tf32(a.w), split_tf32(b.x),
             split_tf32(b.y), split_tf32(b.z), split_tf32(b.w)}};
  }
  static __device__ __forceinline__ void add(float (&sums)[4], const F32::Raw (&raw)[2],
                                             const X& x) {
    float v[2][unit_elems], small[4] = {}, large[4] = {};
    F32::decode(raw[0], v[0]);
    F32::decode(raw[1], v[1]);
#pragma unroll
    for (int i = 0; i < unit_elems; i += 2) {
      const SplitTf32 w[4] = {split_tf32(v[0][i]), split_tf32(v[1][i]), split_tf32(v[0][i + 1]),
                              split_tf32(v[1][i + 1])};
      const std::uint32_t hi[4] = {w[0].hi, w[1].hi, w[2].hi, w[3].hi},
                          lo[4] = {w[0].lo, w[1].lo, w[2].lo, w[3].lo};
      mma_tf32(small, lo, {x.v[i].hi, x.v[i + 1].hi});
      mma_tf32(small, hi, {x.v[i].lo, x.v[i + 1].lo});
      mma_tf32(large, hi, {x.v[i].hi, x.v[i + 1].hi});
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += large[i] + small[i];
  }
};

// Calls f(F{}) for the format of a type; false if there are no products of it.
#pragma nv_exec_check_disable
template <class Function>
__host__ __device__ bool with_products(DType type, Function f) {
  switch (type) {
    case DType::f32:
      f(F32{});
      return true;
    case DType::bf16:
      f(Bf16{});
      return true;
    case DType::q8_0:
      f(Q8{});
      return true;
    default:
      return false;
  }
}

inline bool has_products(const Matrix& m) {
  return with_products(m.type, [](auto) {}) && m.cols % unit_elems == 0;
}

}  // namespace imp::cuda
