// Stored formats as kernels read them: units of 8 weights, loaded in one or two words and decoded
// to exact fp32.
//
// A format F has: Raw, what a lane holds of a unit; load(row, unit); decode(raw, v), to be
// multiplied by factor(raw) if `scaled`; and the elements of a unit: first(u) + 0..3 and
// second(u) + 0..3. Formats without blocks also have one(row, element).
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cpp/core/half.h"
#include "cuda/context.h"

namespace imp::cuda {

inline constexpr int unit_elems = 8;

struct Row {
  const std::byte* data;
  const std::byte* scales;
};
__device__ __forceinline__ Row row_of(const Matrix& m, std::int64_t r) {
  return {m.data + r * m.row_bytes, m.scales + r * m.scale_row_bytes};
}

// Weights pass once: they do not take the first cache's place from the activations.
__device__ __forceinline__ uint4 stream16(const void* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 stream8(const void* p) {
  uint2 v;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ std::uint32_t stream4(const void* p) {
  std::uint32_t v;
  asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ float half_bits_to_float(std::uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

struct Consecutive {
  static constexpr bool scaled = false, blocks = false;
  static __device__ __forceinline__ int first(int u) { return unit_elems * u; }
  static __device__ __forceinline__ int second(int u) { return unit_elems * u + 4; }
};

struct F32 : Consecutive {
  struct Raw {
    uint4 a, b;
  };
  static __device__ __forceinline__ Raw load(const Row& r, int u) {
    return {stream16(r.data + 32ll * u), stream16(r.data + 32ll * u + 16)};
  }
  static __device__ __forceinline__ void decode(const Raw& r, float (&v)[8]) {
    const std::uint32_t w[8] = {r.a.x, r.a.y, r.a.z, r.a.w, r.b.x, r.b.y, r.b.z, r.b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(w[i]);
  }
  static __device__ __forceinline__ float one(const std::byte* p, std::int64_t i) {
    return reinterpret_cast<const float*>(p)[i];
  }
};

struct Bf16 : Consecutive {
  using Raw = uint4;
  static __device__ __forceinline__ Raw load(const Row& r, int u) {
    return stream16(r.data + 16ll * u);
  }
  static __device__ __forceinline__ void decode(const Raw& r, float (&v)[8]) {
    const std::uint32_t w[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __uint_as_float(w[i] << 16);
      v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
  }
  static __device__ __forceinline__ float one(const std::byte* p, std::int64_t i) {
    return __uint_as_float(static_cast<std::uint32_t>(reinterpret_cast<const std::uint16_t*>(p)[i])
                           << 16);
  }
};

struct F16 : Consecutive {
  using Raw = uint4;
  static __device__ __forceinline__ Raw load(const Row& r, int u) {
    return stream16(r.data + 16ll * u);
  }
  static __device__ __forceinline__ void decode(const Raw& r, float (&v)[8]) {
    const std::uint32_t w[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = half_bits_to_float(w[i] & 0xffffu);
      v[2 * i + 1] = half_bits_to_float(w[i] >> 16);
    }
  }
  static __device__ __forceinline__ float one(const std::byte* p, std::int64_t i) {
    return half_bits_to_float(reinterpret_cast<const std::uint16_t*>(p)[i]);
  }
};

__device__ __forceinline__ float e4m3(std::uint32_t b) {
  const float magnitude = (b & 0x7fu) == 0x7fu ? __uint_as_float(0x7fc00000u)
                                               : half_bits_to_float((b & 0x7fu) << 7) * 256.0f;
  return (b & 0x80u) != 0 ? -magnitude : magnitude;
}

struct F8E4m3 : Consecutive {
  using Raw = uint2;
  static __device__ __forceinline__ Raw load(const Row& r, int u) {
    return stream8(r.data + 8ll * u);
  }
  static __device__ __forceinline__ void decode(const Raw& r, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = e4m3(r.x >> (8 * i));
      v[4 + i] = e4m3(r.y >> (8 * i));
    }
  }
  static __device__ __forceinline__ float one(const std::byte* p, std::int64_t i) {
    return e4m3(static_cast<std::uint32_t>(p[i]));
  }
};

// Codes [cols] int8, scales [cols / 32] fp16.
struct Q8 : Consecutive {
  static constexpr bool scaled = true, blocks = true;
  struct Raw {
    uint2 codes;
    std::uint16_t scale;
  };
  static __device__ __forceinline__ Raw load(const Row& r, int u) {
    return {stream8(r.data + 8ll * u),
            __ldg(reinterpret_cast<const std::uint16_t*>(r.scales) + (u >> 2))};
  }
  // A code + 128 as the last byte of the float 2^23: conversions of integers take longer.
  static __device__ __forceinline__ float code(std::uint32_t biased, int i) {
    return __uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7440u + i)) - (0x1p23f + 128);
  }
  static __device__ __forceinline__ void decode(const Raw& r, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = code(r.codes.x ^ 0x80808080u, i);
      v[4 + i] = code(r.codes.y ^ 0x80808080u, i);
    }
  }
  static __device__ __forceinline__ float factor(const Raw& r) {
    return half_bits_to_float(r.scale);
  }
};

// Codes [cols / 2] bytes, scales [cols / 16] E4M3, both packed on upload. A unit is the low and the
// high nibbles of 4 bytes of the file: elements 4h + 0..3 and 4h + 8 + 0..3 of a group of 16.
//
// A code's sign and magnitude, put on an fp16's, make a number 2^14 too small. Each half of a
// packed word holds 4 codes, of which the first has its bits in place:
//   sign, magnitude of a: 15, 11..9; b: 12, 8..6; c: 14, 5..3; d: 13, 2..0
struct Nvfp4 {
  static constexpr bool scaled = true, blocks = true;
  // Codes and scales together decode to 2^22 less than their value; whoever uploads puts that into
  // the matrix's scale.
  static constexpr float missing = 0x1p22f;
  static __device__ __forceinline__ int first(int u) { return 16 * (u >> 1) + 4 * (u & 1); }
  static __device__ __forceinline__ int second(int u) { return first(u) + 8; }
  struct Raw {
    std::uint32_t codes;
    std::uint8_t scale;
  };
  static __device__ __forceinline__ Raw load(const Row& r, int u) {
    return {stream4(r.data + 4ll * u),
            __ldg(reinterpret_cast<const std::uint8_t*>(r.scales) + (u >> 1))};
  }
  static __device__ __forceinline__ float2 pair(std::uint32_t bits) {
    __half2 h;
    __builtin_memcpy(&h, &bits, 4);
    return __half22float2(h);
  }
  static __device__ __forceinline__ void decode(const Raw& r, float (&v)[8]) {
    constexpr std::uint32_t sign = 0x80008000u, magnitude = 0x0e000e00u;
    const std::uint32_t q = r.codes;
    const float2 a = pair(q & (sign | magnitude)), b = pair(q << 3 & (sign | magnitude)),
                 c = pair((q << 1 & sign) | (q << 6 & magnitude)),
                 d = pair((q << 2 & sign) | (q << 9 & magnitude));
    v[0] = a.x, v[2] = a.y, v[1] = b.x, v[3] = b.y;
    v[4] = c.x, v[6] = c.y, v[5] = d.x, v[7] = d.y;
  }
  static __device__ __forceinline__ float factor(const Raw& r) {
    return half_bits_to_float(static_cast<std::uint32_t>(r.scale) << 7);
  }

  // Nibbles of a half, from its lowest: v0, v4, v1, v5 (or v2, v6, v3, v7).
  static __device__ std::uint32_t pack_codes(std::uint32_t q) {
    const auto put = [q](int nibble, int sign, int magnitude) {
      const std::uint32_t both = q >> (4 * nibble) & 0x000f000fu;
      return (both >> 3 & 0x00010001u) << sign | (both & 0x00070007u) << magnitude;
    };
    return put(0, 15, 9) | put(2, 12, 6) | put(1, 14, 3) | put(3, 13, 0);
  }
  // Scales are unsigned, and 0x7f counts as 0.
  static __device__ std::uint32_t pack_scales(std::uint32_t four) {
    std::uint32_t out = 0;
    for (int i = 0; i < 32; i += 8) {
      const std::uint32_t b = four >> i & 0x7fu;
      if (b != 0x7fu) out |= b << i;
    }
    return out;
  }
};

}  // namespace imp::cuda
