// The stored formats as loops see them: blocks that open once and yield vectors of 16 exact fp32
// weights. Included by the per-instruction-set files only.
//
// A format F has: vectors and bytes per block, Block open(p), V get<I>(block), V tail(p, n) for the
// last n < 16 elements of formats without blocks.
#pragma once

#include "cpp/cpu/kernels/vec.h"
#include "cpp/quant/quant.h"

namespace imp::cpu {
namespace {

inline std::uint16_t load_u16(const std::byte* p) {
  std::uint16_t h;
  __builtin_memcpy(&h, p, sizeof h);
  return h;
}

struct F32 {
  static constexpr int vectors = 1, bytes = 64;
  using Block = const std::byte*;
  static IMP_INLINE Block open(const std::byte* p) { return p; }
  template <int I>
  static IMP_INLINE V get(const Block& p) {
    return load(reinterpret_cast<const float*>(p));
  }
  static IMP_INLINE V tail(const std::byte* p, std::int64_t n) {
    return load_n(reinterpret_cast<const float*>(p), n);
  }
};

struct Bf16 {
  static constexpr int vectors = 1, bytes = 32;
  using Block = const std::byte*;
  static IMP_INLINE Block open(const std::byte* p) { return p; }
  template <int I>
  static IMP_INLINE V get(const Block& p) {
    return load_bf16(p);
  }
  static IMP_INLINE V tail(const std::byte* p, std::int64_t n) {
    float t[lanes] = {};
    for (std::int64_t i = 0; i < n; ++i) t[i] = bf16_to_float(load_u16(p + 2 * i));
    return load(t);
  }
};

struct F16 {
  static constexpr int vectors = 1, bytes = 32;
  using Block = const std::byte*;
  static IMP_INLINE Block open(const std::byte* p) { return p; }
  template <int I>
  static IMP_INLINE V get(const Block& p) {
    return load_f16(p);
  }
  static IMP_INLINE V tail(const std::byte* p, std::int64_t n) {
    float t[lanes] = {};
    for (std::int64_t i = 0; i < n; ++i) t[i] = half_to_float(load_u16(p + 2 * i));
    return load(t);
  }
};

struct F8E4m3 {
  static constexpr int vectors = 1, bytes = 16;
  using Block = const std::byte*;
  static IMP_INLINE Block open(const std::byte* p) { return p; }
  template <int I>
  static IMP_INLINE V get(const Block& p) {
    return tail(p, lanes);
  }
  static IMP_INLINE V tail(const std::byte* p, std::int64_t n) {
    float t[lanes] = {};
    for (std::int64_t i = 0; i < n; ++i) t[i] = e4m3_to_float(static_cast<std::uint8_t>(p[i]));
    return load(t);
  }
};

// An fp16 scale times a signed byte has at most 18 significant bits: exact.
struct Q8 {
  static constexpr int vectors = 2, bytes = 34;
  struct Block {
    const std::byte* p;
    V scale;
  };
  static IMP_INLINE Block open(const std::byte* p) { return {p + 2, set1_f16(p)}; }
  template <int I>
  static IMP_INLINE V get(const Block& b) {
    return load_i8(b.p + 16 * I) * b.scale;
  }
  static IMP_INLINE V tail(const std::byte*, std::int64_t) { return zero(); }
};

// nvfp4::scale of every byte, to be multiplied from memory.
struct Nvfp4Scales {
  float value[256];
};
constexpr Nvfp4Scales make_nvfp4_scales() {
  Nvfp4Scales t{};
  for (int b = 0; b < 256; ++b) t.value[b] = nvfp4::scale(static_cast<std::uint8_t>(b));
  return t;
}
alignas(64) constexpr Nvfp4Scales nvfp4_scales = make_nvfp4_scales();

// A code has 2 significant bits and a scale 4: the product is exact.
struct Nvfp4 {
  static constexpr int vectors = 4, bytes = 36;
  struct Block {
    const std::byte* p;
    E2m1Block codes;
  };
  static IMP_INLINE Block open(const std::byte* p) { return {p, load_e2m1_block(p + 4)}; }
  template <int I>
  static IMP_INLINE V get(const Block& b) {
    return e2m1_group<I>(b.codes) * set1(nvfp4_scales.value[static_cast<std::uint8_t>(b.p[I])]);
  }
  static IMP_INLINE V tail(const std::byte*, std::int64_t) { return zero(); }
};

// Calls f(F{}) for the format of a type. The loader refuses types without one.
template <class F>
IMP_INLINE void with_format(DType type, F f) {
  switch (type) {
    case DType::f32:
      return f(F32{});
    case DType::f16:
      return f(F16{});
    case DType::bf16:
      return f(Bf16{});
    case DType::f8_e4m3:
      return f(F8E4m3{});
    case DType::q8_0:
      return f(Q8{});
    case DType::nvfp4:
      return f(Nvfp4{});
    default:
      __builtin_trap();
  }
}

// Calls f.operator()<I>() for I = 0..N-1.
template <int N, int I = 0, class F>
IMP_INLINE void unrolled(F& f) {
  if constexpr (I < N) {
    f.template operator()<I>();
    unrolled<N, I + 1>(f);
  }
}

}  // namespace
}  // namespace imp::cpu
