// GGUF v2/v3: header, keys, tensor infos. Facts of the format: ggml's docs/gguf.md.
#include "cpp/gguf/reader.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

namespace imp::gguf {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::size_t min_key_bytes = 8 + 1 + 4 + 1;         // length, name, type, value
constexpr std::size_t min_tensor_bytes = 8 + 1 + 4 + 4 + 8;  // length, name, n_dims, type, offset
constexpr std::size_t string_bytes = 8;                      // an empty string
constexpr std::size_t array_bytes = 4 + 8;                   // an empty array

std::string_view checked_name(Cursor& in, const std::string& what) {
  in.set_subject("the name of " + what);
  const auto length = in.read<std::uint64_t>();
  if (length == 0) in.bad(str(what, " has an empty name"));
  if (length > max_name_bytes)
    in.bad(str("the name of ", what, " has ", length, " bytes, up to ", max_name_bytes,
               " are possible"));
  return in.characters(length);
}

}  // namespace

Reader::Reader(std::span<const std::byte> bytes, const std::string& file, const Limits& limits)
    : bytes_(bytes), in_(bytes, file, limits.metadata_bytes) {
  const std::uint64_t n_tensors = header();
  for (std::uint64_t i = 0; i < n_keys_; ++i) read_key();
  read_alignment();
  in_.set_subject(str("a list of ", n_tensors, " tensors"));
  in_.need(n_tensors, min_tensor_bytes);
  tensors.reserve(static_cast<std::size_t>(n_tensors));
  for (std::uint64_t i = 0; i < n_tensors; ++i) tensors.push_back(read_tensor());
  place_tensors();
}

std::uint64_t Reader::header() {
  if (in_.remaining() < 4 || in_.characters(4) != "GGUF") in_.bad("not a GGUF file");
  version = in_.read<std::uint32_t>();
  if ((version & 0xffffu) == 0 && version != 0)
    in_.unsupported("a big-endian GGUF, imp reads little-endian ones");
  if (version < min_version || version > max_version)
    in_.unsupported(
        str("GGUF version ", version, ", imp reads ", min_version, " to ", max_version));
  const auto n_tensors = in_.read<std::uint64_t>();
  n_keys_ = in_.read<std::uint64_t>();
  in_.set_subject(str("a list of ", n_keys_, " keys"));
  in_.need(n_keys_, min_key_bytes);
  in_.set_subject(str("a list of ", n_tensors, " tensors"));
  in_.need(n_tensors, min_tensor_bytes);
  return n_tensors;
}

ValueType Reader::read_type() {
  const auto id = in_.read<std::uint32_t>();
  if (id > static_cast<std::uint32_t>(ValueType::f64))
    in_.bad(str(subject_, " has value type ", id, ", 0 to ",
                static_cast<std::uint32_t>(ValueType::f64), " are known"));
  return static_cast<ValueType>(id);
}

void Reader::read_key() {
  std::string key(checked_name(in_, str("key ", keys.map().size() + 1, " of ", n_keys_)));
  subject_ = "key " + quote(key);
  in_.set_subject(subject_);
  if (keys.has(key)) in_.bad(subject_ + " is there twice");
  Value value = read_value(read_type());
  keys.set(std::move(key), std::move(value));
}

Value Reader::read_value(ValueType type) {
  const auto natural = [&](std::uint64_t v) { return Value{type, v}; };
  const auto integer = [&](std::int64_t v) { return Value{type, v}; };
  switch (type) {
    case ValueType::u8:
      return natural(in_.read<std::uint8_t>());
    case ValueType::u16:
      return natural(in_.read<std::uint16_t>());
    case ValueType::u32:
      return natural(in_.read<std::uint32_t>());
    case ValueType::u64:
      return natural(in_.read<std::uint64_t>());
    case ValueType::i8:
      return integer(in_.read<std::int8_t>());
    case ValueType::i16:
      return integer(in_.read<std::int16_t>());
    case ValueType::i32:
      return integer(in_.read<std::int32_t>());
    case ValueType::i64:
      return integer(in_.read<std::int64_t>());
    case ValueType::f32:
      return {type, static_cast<double>(in_.read<float>())};
    case ValueType::f64:
      return {type, in_.read<double>()};
    case ValueType::boolean: {
      const auto byte = in_.read<std::uint8_t>();
      if (byte > 1) in_.bad(str(subject_, " is the bool ", int{byte}, ", 0 and 1 are possible"));
      return {type, byte == 1};
    }
    case ValueType::string:
      return {type, std::string(in_.string())};
    case ValueType::array:
      return {type, read_array(1)};
  }
  in_.bad(subject_ + " has no value");
}

template <class T>
std::vector<T> Reader::numbers(std::uint64_t count) {
  in_.need(count, sizeof(T));
  const std::string_view raw = in_.characters(count * sizeof(T));
  std::vector<T> out(static_cast<std::size_t>(count));
  if (!out.empty()) std::memcpy(out.data(), raw.data(), raw.size());
  return out;
}

Array Reader::read_array(int depth) {
  const ValueType type = read_type();
  const auto count = in_.read<std::uint64_t>();
  switch (type) {
    case ValueType::u8:
      return {type, numbers<std::uint8_t>(count)};
    case ValueType::u16:
      return {type, numbers<std::uint16_t>(count)};
    case ValueType::u32:
      return {type, numbers<std::uint32_t>(count)};
    case ValueType::u64:
      return {type, numbers<std::uint64_t>(count)};
    case ValueType::i8:
      return {type, numbers<std::int8_t>(count)};
    case ValueType::i16:
      return {type, numbers<std::int16_t>(count)};
    case ValueType::i32:
      return {type, numbers<std::int32_t>(count)};
    case ValueType::i64:
      return {type, numbers<std::int64_t>(count)};
    case ValueType::f32:
      return {type, numbers<float>(count)};
    case ValueType::f64:
      return {type, numbers<double>(count)};
    case ValueType::boolean: {
      auto bytes = numbers<std::uint8_t>(count);
      for (const std::uint8_t b : bytes)
        if (b > 1) in_.bad(str(subject_, " has the bool ", int{b}, ", 0 and 1 are possible"));
      return {type, std::move(bytes)};
    }
    case ValueType::string: {
      in_.need(count, string_bytes);
      std::vector<std::string> strings;
      strings.reserve(static_cast<std::size_t>(count));
      for (std::uint64_t i = 0; i < count; ++i) strings.emplace_back(in_.string());
      return {type, std::move(strings)};
    }
    case ValueType::array: {
      if (depth >= max_array_depth)
        in_.unsupported(
            str(subject_, " nests arrays ", depth + 1, " deep, imp reads up to ", max_array_depth));
      in_.need(count, array_bytes);
      std::vector<Array> arrays;
      arrays.reserve(static_cast<std::size_t>(count));
      for (std::uint64_t i = 0; i < count; ++i) arrays.push_back(read_array(depth + 1));
      return {type, std::move(arrays)};
    }
  }
  in_.bad(subject_ + " has no elements");
}

void Reader::read_alignment() {
  const Value* value = keys.find("general.alignment");
  if (value == nullptr) return;
  if (value->type != ValueType::u32)
    in_.bad(str("key 'general.alignment' is ", name(value->type), ", u32 is needed"));
  const auto bytes = std::get<std::uint64_t>(value->data);
  if (!std::has_single_bit(bytes) || bytes < min_alignment || bytes > max_alignment)
    in_.bad(str("key 'general.alignment' is ", bytes, ", a power of two from ", min_alignment,
                " to ", max_alignment, " is possible"));
  alignment_ = static_cast<std::uint32_t>(bytes);
}

TensorInfo Reader::read_tensor() {
  TensorInfo t;
  t.name = checked_name(in_, str("tensor ", tensors.size() + 1));
  subject_ = "tensor " + quote(t.name);
  in_.set_subject(subject_);
  const auto n_dims = in_.read<std::uint32_t>();
  if (n_dims > static_cast<std::uint32_t>(max_dims))
    in_.bad(str(subject_, " has ", n_dims, " dimensions, up to ", max_dims, " are possible"));
  constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::uint64_t elems = 1;
  for (std::uint32_t d = 0; d < n_dims; ++d) {
    const auto size = in_.read<std::uint64_t>();
    if (size == 0) in_.bad(str(subject_, " has size 0 in dimension ", d, " of ", n_dims));
    if (size > most / elems)
      in_.bad(str(subject_, " has more than ", most, " elements: ", elems, " x ", size));
    elems *= size;
    t.dims.push_back(static_cast<std::int64_t>(size));
  }
  if (t.dims.empty()) t.dims.push_back(1);  // a scalar

  const auto id = in_.read<std::uint32_t>();
  const auto* type = id < first_private_type ? find_type(static_cast<std::int32_t>(id)) : nullptr;
  if (type == nullptr) in_.unsupported(str(subject_, " has type id ", id, ", which is unknown"));
  t.dtype = type->dtype;
  if (t.dims[0] % type->block_elems != 0)
    in_.bad(str(subject_, " has rows of ", t.dims[0], " elements, not a multiple of the ",
                type->block_elems, "-element blocks of ", type->name));
  const std::uint64_t blocks = elems / static_cast<std::uint64_t>(type->block_elems);
  const auto block_bytes = static_cast<std::uint64_t>(type->block_bytes);
  if (blocks > most / block_bytes)
    in_.bad(str(subject_, " has more than ", most, " bytes: ", blocks, " blocks of ", block_bytes));
  t.n_bytes = static_cast<std::size_t>(blocks * block_bytes);

  const auto offset = in_.read<std::uint64_t>();
  if (offset % alignment_ != 0)
    in_.bad(
        str(subject_, " has offset ", offset, ", not a multiple of the alignment ", alignment_));
  t.file_offset = static_cast<std::size_t>(offset);  // from the data section, until it is placed
  return t;
}

// The data section starts at the next multiple of the alignment; every tensor lies inside the file
// and on no other.
void Reader::place_tensors() {
  if (tensors.empty()) return;
  const std::uint64_t start =
      (in_.position() + std::uint64_t{alignment_} - 1) / alignment_ * std::uint64_t{alignment_};
  const std::uint64_t file_bytes = bytes_.size();
  for (TensorInfo& t : tensors) {
    if (start > file_bytes || t.file_offset > file_bytes - start ||
        t.n_bytes > file_bytes - start - t.file_offset)
      in_.bad(str("truncated: tensor ", quote(t.name), " has ", t.n_bytes, " bytes at ", start,
                  " + ", t.file_offset, ", the file has ", file_bytes));
    t.file_offset += static_cast<std::size_t>(start);
    t.data = bytes_.data() + t.file_offset;
  }
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return tensors[a].file_offset < tensors[b].file_offset;
  });
  for (std::size_t i = 1; i < order.size(); ++i) {
    const TensorInfo& a = tensors[order[i - 1]];
    const TensorInfo& b = tensors[order[i]];
    if (a.file_offset + a.n_bytes > b.file_offset)
      in_.bad(str("tensors ", quote(a.name), " and ", quote(b.name),
                  " overlap: ", a.file_offset + a.n_bytes, " > ", b.file_offset));
  }
}

}  // namespace imp::gguf
