// Tensor cores: products of a warp in bf16 and in tf32, and fp32 as a sum of two of either.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/common/shared_memory.cuh"

namespace imp::cuda {

// d += a b with fp32 sums; a [16, 16], b [16, 8], d [16, 8]. With g = lane / 4 and c = lane % 4:
//   a: rows g, g + 8, g, g + 8 of columns 2c, 2c, 2c + 8, 2c + 8, each with its right neighbour
//   b: rows 2c and 2c + 8, each with the row below, of column g
//   d: row g columns 2c, 2c + 1, then row g + 8
// Columns of a may be permuted if b's rows are as well.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4],
                                         const std::uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same of tf32 (fp32 with 10 bits behind the point, the others are not read), 8 columns of a:
//   a: rows g, g + 8, g, g + 8 of columns c, c, c + 4, c + 4
//   b: rows c and c + 4 of column g
__device__ __forceinline__ void mma_tf32(float (&d)[4], const std::uint32_t (&a)[4],
                                         const std::uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Operand a from shared memory. Lane l names 8 columns (16 bytes) of one row: row l % 8 of rows
// 0..7 (lanes 0..7 and 16..23) or 8..15, and columns 0..7 (lanes 0..15) or 8..15.
__device__ __forceinline__ void load_a(std::uint32_t (&a)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared_address(shared))
               : "memory");
}

// Two bf16 in a word, the first in its lower half.
__device__ __forceinline__ std::uint32_t bf16_pair(float x, float y) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
  std::uint32_t bits;
  __builtin_memcpy(&bits, &v, 4);
  return bits;
}

struct SplitPair {
  std::uint32_t hi, lo;
};

// x and y as hi + lo; what is lost is below 2^-17 of them.
__device__ __forceinline__ SplitPair split_pair(float x, float y) {
  const std::uint32_t hi = bf16_pair(x, y);
  return {hi, bf16_pair(x - __uint_as_float(hi << 16), y - __uint_as_float(hi & 0xffff0000u))};
}

__device__ __forceinline__ std::uint32_t tf32(float x) {
  std::uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

struct SplitTf32 {
  std::uint32_t hi, lo;
};

// x as hi + lo; what is lost is below 2^-23 of it.
__device__ __forceinline__ SplitTf32 split_tf32(float x) {
  const std::uint32_t hi = tf32(x);
  return {hi, tf32(x - __uint_as_float(hi))};
}

// The same with less work where 2^-21 will do. The two-byte types are all in hi.
__device__ __forceinline__ std::uint32_t tf32_hi(float x) { return __float_as_uint(x) & ~0x1fffu; }
__device__ __forceinline__ std::uint32_t tf32_lo(float x) {
  return __float_as_uint(x - __uint_as_float(tf32_hi(x)));
}

}  // namespace imp::cuda
