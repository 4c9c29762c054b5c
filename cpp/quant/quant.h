// The table of storage types: every type that a GGUF may name, its block shape, and which ones imp
// computes with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace imp {

// Values are ggml's type ids (what a GGUF stores), except the last one, which GGUF has no id for.
enum class DType : std::int32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q8_1 = 9,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  q8_k = 15,
  iq2_xxs = 16,
  iq2_xs = 17,
  iq3_xxs = 18,
  iq1_s = 19,
  iq4_nl = 20,
  iq3_s = 21,
  iq2_s = 22,
  iq4_xs = 23,
  i8 = 24,
  i16 = 25,
  i32 = 26,
  i64 = 27,
  f64 = 28,
  iq1_m = 29,
  bf16 = 30,
  tq1_0 = 34,
  tq2_0 = 35,
  mxfp4 = 39,
  nvfp4 = 40,
  q1_0 = 41,
  q2_0 = 42,
  f8_e4m3 = 1000,  // the n-gram table as released; in a file its bytes are typed I8
};

struct TypeInfo {
  DType dtype;
  std::string_view name;     // as ggml prints it
  std::int32_t block_elems;  // elements per block
  std::int32_t block_bytes;  // bytes per block
  bool computes;             // imp has kernels for it
};

std::span<const TypeInfo> type_table();
// nullptr if ggml's id is unknown.
const TypeInfo* find_type(std::int32_t id);
// Fails on a type that is not in the table.
const TypeInfo& type_info(DType dtype);

// Bytes of `elems` consecutive elements of a row; fails if they are not whole blocks.
std::size_t row_bytes(DType dtype, std::int64_t elems);

// Decodes one row of `elems` elements to fp32 (reference path; fails for types without `computes`).
void decode_row(DType dtype, const std::byte* src, std::int64_t elems, float* dst);

// Rounds one row of `elems` fp32 elements to f32, f16, bf16 or q8_0; fails for other types.
void encode_row(DType dtype, const float* src, std::int64_t elems, std::byte* dst);

}  // namespace imp
