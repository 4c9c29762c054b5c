// Block shapes from ggml's type table; decoders of the types that imp computes with.
#include "cpp/quant/quant.h"

#include <cstring>

#include "cpp/core/error.h"
#include "cpp/core/half.h"
#include "cpp/quant/nvfp4.h"
#include "cpp/quant/q8_0.h"

namespace imp {
namespace {

constexpr TypeInfo table[] = {
    {DType::f32, "F32", 1, 4, true},
    {DType::f16, "F16", 1, 2, true},
    {DType::q4_0, "Q4_0", 32, 18, false},
    {DType::q4_1, "Q4_1", 32, 20, false},
    {DType::q5_0, "Q5_0", 32, 22, false},
    {DType::q5_1, "Q5_1", 32, 24, false},
    {DType::q8_0, "Q8_0", 32, 34, true},
    {DType::q8_1, "Q8_1", 32, 36, false},
    {DType::q2_k, "Q2_K", 256, 84, false},
    {DType::q3_k, "Q3_K", 256, 110, false},
    {DType::q4_k, "Q4_K", 256, 144, false},
    {DType::q5_k, "Q5_K", 256, 176, false},
    {DType::q6_k, "Q6_K", 256, 210, false},
    {DType::q8_k, "Q8_K", 256, 292, false},
    {DType::iq2_xxs, "IQ2_XXS", 256, 66, false},
    {DType::iq2_xs, "IQ2_XS", 256, 74, false},
    {DType::iq3_xxs, "IQ3_XXS", 256, 98, false},
    {DType::iq1_s, "IQ1_S", 256, 50, false},
    {DType::iq4_nl, "IQ4_NL", 32, 18, false},
    {DType::iq3_s, "IQ3_S", 256, 110, false},
    {DType::iq2_s, "IQ2_S", 256, 82, false},
    {DType::iq4_xs, "IQ4_XS", 256, 136, false},
    {DType::i8, "I8", 1, 1, false},
    {DType::i16, "I16", 1, 2, false},
    {DType::i32, "I32", 1, 4, false},
    {DType::i64, "I64", 1, 8, false},
    {DType::f64, "F64", 1, 8, false},
    {DType::iq1_m, "IQ1_M", 256, 56, false},
    {DType::bf16, "BF16", 1, 2, true},
    {DType::tq1_0, "TQ1_0", 256, 54, false},
    {DType::tq2_0, "TQ2_0", 256, 66, false},
    {DType::mxfp4, "MXFP4", 32, 17, false},
    {DType::nvfp4, "NVFP4", 64, 36, true},
    {DType::q1_0, "Q1_0", 128, 18, false},
    {DType::q2_0, "Q2_0", 64, 18, false},
    {DType::f8_e4m3, "F8_E4M3", 1, 1, true},
};

template <class T>
T load(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

}  // namespace

std::span<const TypeInfo> type_table() { return table; }

const TypeInfo* find_type(std::int32_t id) {
  for (const TypeInfo& t : table)
    if (static_cast<std::int32_t>(t.dtype) == id) return &t;
  return nullptr;
}

const TypeInfo& type_info(DType dtype) {
  if (const TypeInfo* t = find_type(static_cast<std::int32_t>(dtype))) return *t;
  fail(ErrorCode::unsupported,
       str("tensor type id ", static_cast<std::int32_t>(dtype), " is unknown"));
}

std::size_t row_bytes(DType dtype, std::int64_t elems) {
  const TypeInfo& t = type_info(dtype);
  if (elems < 0 || elems % t.block_elems != 0)
    fail(ErrorCode::bad_file, str("a row of ", elems, " elements is not a multiple of the ",
                                  t.block_elems, "-element blocks of ", t.name));
  return static_cast<std::size_t>(elems / t.block_elems) * static_cast<std::size_t>(t.block_bytes);
}

void decode_row(DType dtype, const std::byte* src, std::int64_t elems, float* dst) {
  switch (dtype) {
    case DType::f32:
      std::memcpy(dst, src, static_cast<std::size_t>(elems) * 4);
      return;
    case DType::f16:
      for (std::int64_t i = 0; i < elems; ++i)
        dst[i] = half_to_float(load<std::uint16_t>(src + 2 * i));
      return;
    case DType::bf16:
      for (std::int64_t i = 0; i < elems; ++i)
        dst[i] = bf16_to_float(load<std::uint16_t>(src + 2 * i));
      return;
    case DType::f8_e4m3:
      for (std::int64_t i = 0; i < elems; ++i)
        dst[i] = e4m3_to_float(static_cast<std::uint8_t>(src[i]));
      return;
    case DType::q8_0:
      for (std::int64_t i = 0; i < elems; i += q8_0::block_elems)
        q8_0::decode(src + i / q8_0::block_elems * q8_0::block_bytes, dst + i);
      return;
    case DType::nvfp4:
      for (std::int64_t i = 0; i < elems; i += nvfp4::block_elems)
        nvfp4::decode(src + i / nvfp4::block_elems * nvfp4::block_bytes, dst + i);
      return;
    default:
      fail(ErrorCode::unsupported, str("imp does not compute with type ", type_info(dtype).name));
  }
}

void encode_row(DType dtype, const float* src, std::int64_t elems, std::byte* dst) {
  const auto halves = [&](auto encode) {
    for (std::int64_t i = 0; i < elems; ++i) {
      const std::uint16_t h = encode(src[i]);
      std::memcpy(dst + 2 * i, &h, sizeof h);
    }
  };
  switch (dtype) {
    case DType::f32:
      std::memcpy(dst, src, static_cast<std::size_t>(elems) * 4);
      return;
    case DType::f16:
      return halves([](float f) { return float_to_half(f); });
    case DType::bf16:
      return halves([](float f) { return float_to_bf16(f); });
    case DType::q8_0:
      for (std::int64_t i = 0; i < elems; i += q8_0::block_elems)
        q8_0::encode(src + i, dst + i / q8_0::block_elems * q8_0::block_bytes);
      return;
    default:
      fail(ErrorCode::unsupported, str("imp does not write type ", type_info(dtype).name));
  }
}

}  // namespace imp
