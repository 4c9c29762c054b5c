// Products of a warp group (four warps in a row) with both operands in shared memory, as compute
// capability 9.0 alone has them: code for sm_90a. Other code never calls them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/common/shared_memory.cuh"

namespace imp::cuda {

inline constexpr int group_threads = 128, group_rows = 64;  // rows of a product
inline constexpr int line_bytes = 128;                      // of an operand's row, swizzled
inline constexpr int product_bytes = 32;                    // of it that a product takes: 16 bf16

// Rows of 128 bytes, as a tensor copy with that swizzle writes them; `rows` on 1024 bytes.
__device__ __forceinline__ std::uint64_t operand(const std::byte* rows) {
  constexpr std::uint64_t eight_rows = 8 * line_bytes, swizzle_128 = 1;
  return shared_address(rows) >> 4 | std::uint64_t{1} << 16 | eight_rows >> 4 << 32 |
         swizzle_128 << 62;
}
// The columns of the k-th product.
__device__ __forceinline__ std::uint64_t columns(std::uint64_t operand, int k) {
  return operand + static_cast<std::uint64_t>(k * product_bytes >> 4);
}

__device__ __forceinline__ void begin_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// What was started since becomes a group.
__device__ __forceinline__ void end_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until all groups but the latest Groups are done.
template <int Groups>
__device__ __forceinline__ void await_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Groups) : "memory");
#endif
}
// Sums that products write are neither read before nor written after this point.
template <int N>
__device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d += a b^T with fp32 sums; a [64, 16], b [2 N, 16], d [64, 2 N], all of bf16 but d. Warp w of the
// group has rows 16 w on. With g = lane / 4 and c = lane % 4, for every 8 columns:
//   d: row g columns 2c, 2c + 1, then row g + 8
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define TEN(t) \
  "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define SUMS8(i)                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS(i) SUMS8(i), SUMS8(i + 8), SUMS8(i + 16), SUMS8(i + 24)
#define PRODUCT(columns, d, a, b)                                                    \
  "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" d "}, " a ", " b \
  ", 1, 1, 1, 0, 0;"
#else
#define PRODUCT(...) ""
#define SUMS(i) "+f"(d[i])
#endif
__device__ __forceinline__ void multiply(float (&d)[32], std::uint64_t a, std::uint64_t b) {
  asm volatile(PRODUCT("64", TEN() TEN(1) TEN(2) "%30,%31", "%32", "%33")
               : SUMS(0)
               : "l"(a), "l"(b));
}
__device__ __forceinline__ void multiply(float (&d)[64], std::uint64_t a, std::uint64_t b) {
  asm volatile(
      PRODUCT("128", TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63", "%64", "%65")
      : SUMS(0), SUMS(32)
      : "l"(a), "l"(b));
}
__device__ __forceinline__ void multiply(float (&d)[128], std::uint64_t a, std::uint64_t b) {
  asm volatile(PRODUCT("256",
                       TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10)
                           TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127",
                       "%128", "%129")
               : SUMS(0), SUMS(32), SUMS(64), SUMS(96)
               : "l"(a), "l"(b));
}
#undef TEN
#undef SUMS8
#undef SUMS
#undef PRODUCT

}  // namespace imp::cuda
