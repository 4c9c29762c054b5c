// The stored formats as loops see them: blocks that open once and yield vectors of 16 exact fp32
// weights. Included by the per-instruction-set files only.
//
// A format F has: vectors and bytes per block; Block<H> open<H>(p) and Part get<I>(block), part H
// of vector I; V tail(p, n) for the last n < 16 elements of formats without blocks.
#pragma once

#include "cpp/cpu/kernels/vec.h"
#include "cpp/quant/nvfp4.h"
#include "cpp/quant/quant.h"

namespace imp::cpu {
namespace {

inline std::uint16_t load_u16(const std::byte* p) {
  std::uint16_t h;
  __builtin_memcpy(&h, p, sizeof h);
  return h;
}

struct Plain {
  static constexpr int vectors = 1;
  template <int H>
  struct Block {
    const std::byte* p;
  };
  template <int H>
  static IMP_INLINE Block<H> open(const std::byte* p) {
    return {p};
  }
};

struct F32 : Plain {
  static constexpr int bytes = 64;
  template <int I, int H>
  static IMP_INLINE Part get(const Block<H>& b) {
    return load_part<H>(reinterpret_cast<const float*>(b.p));
  }
  static IMP_INLINE V tail(const std::byte* p, std::int64_t n) {
    return load_n(reinterpret_cast<const float*>(p), n);
  }
};

struct Bf16 : Plain {
  static constexpr int bytes = 32;
  template <int I, int H>
  static IMP_INLINE Part get(const Block<H>& b) {
    return load_bf16<H>(b.p);
  }
  static IMP_INLINE V tail(const std::byte* p, std::int64_t n) {
    float t[lanes] = {};
    for (std::int64_t i = 0; i < n; ++i) t[i] = bf16_to_float(load_u16(p + 2 * i));
    return load(t);
  }
};

struct F16 : Plain {
  static constexpr int bytes = 32;
  template <int I, int H>
  static IMP_INLINE Part get(const Block<H>& b) {
    return load_f16<H>(b.p);
  }
  static IMP_INLINE V tail(const std::byte* p, std::int64_t n) {
    float t[lanes] = {};
    for (std::int64_t i = 0; i < n; ++i) t[i] = half_to_float(load_u16(p + 2 * i));
    return load(t);
  }
};

struct F8E4m3 : Plain {
  static constexpr int bytes = 16;
  template <int I, int H>
  static IMP_INLINE Part get(const Block<H>& b) {
    return part<H>(tail(b.p, lanes));
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
  template <int H>
  struct Block {
    const std::byte* p;
    Part scale;
  };
  template <int H>
  static IMP_INLINE Block<H> open(const std::byte* p) {
    return {p + 2, part_f16(p)};
  }
  template <int I, int H>
  static IMP_INLINE Part get(const Block<H>& b) {
    return load_i8<H>(b.p + 16 * I) * b.scale;
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
  template <int H>
  struct Block {
    const std::byte* p;
    E2m1Block<H> codes;
  };
  template <int H>
  static IMP_INLINE Block<H> open(const std::byte* p) {
    return {p, load_e2m1_block<H>(p + 4)};
  }
  template <int I, int H>
  static IMP_INLINE Part get(const Block<H>& b) {
    return e2m1_group<I>(b.codes) * part_f32(nvfp4_scales.value[static_cast<std::uint8_t>(b.p[I])]);
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
