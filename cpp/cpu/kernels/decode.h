// Stored weights to fp32 rows. Included by table.h.
#pragma once

#include "cpp/cpu/kernels/formats.h"

namespace imp::cpu {
namespace {

// n elements: whole blocks, or any number for formats without blocks. put(i, v) takes elements
// i..i+16.
template <class F, class Put>
IMP_INLINE void decode_vectors(const std::byte* src, std::int64_t n, Put put) {
  constexpr std::int64_t elems = F::vectors * lanes;
  std::int64_t i = 0;
  for (; i + elems <= n; i += elems, src += F::bytes) {
    auto one = [&]<int I>() {
      Part p[parts];
      auto half = [&]<int H>() { p[H] = F::template get<I>(F::template open<H>(src)); };
      unrolled<parts>(half);
      put(i + I * lanes, join(p));
    };
    unrolled<F::vectors>(one);
  }
  if (i < n) put(i, F::tail(src, n - i));
}

inline void decode(DType type, const std::byte* src, std::int64_t n, float scale, float* dst) {
  const V s = set1(scale);
  with_format(type, [&]<class F>(F) {
    decode_vectors<F>(src, n, [&](std::int64_t i, V v) {
      if (i + lanes <= n)
        store(dst + i, v * s);
      else
        store_n(dst + i, v * s, n - i);
    });
  });
}

}  // namespace
}  // namespace imp::cpu
