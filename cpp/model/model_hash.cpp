// A few pages of each tensor are read, all of them asked for before the first is looked at.
#include "cpp/model/model_hash.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "cpp/core/hash.h"

namespace imp {
namespace {

void add(Hash& hash, const gguf::Array& array) {
  hash.word(static_cast<std::uint64_t>(array.element));
  std::visit(
      [&](const auto& items) {
        using Item = typename std::decay_t<decltype(items)>::value_type;
        hash.word(items.size());
        if constexpr (std::is_same_v<Item, std::string>) {
          for (const std::string& s : items) hash.text(s);
        } else if constexpr (std::is_same_v<Item, gguf::Array>) {
          for (const gguf::Array& a : items) add(hash, a);
        } else {
          hash.bytes(items.data(), items.size() * sizeof(Item));
        }
      },
      array.data);
}

void add(Hash& hash, const gguf::Value& value) {
  hash.word(static_cast<std::uint64_t>(value.type));
  std::visit(
      [&](const auto& v) {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, std::string>) {
          hash.text(v);
        } else if constexpr (std::is_same_v<T, gguf::Array>) {
          add(hash, v);
        } else if constexpr (std::is_same_v<T, bool>) {
          hash.word(v ? 1 : 0);
        } else {
          hash.word(std::bit_cast<std::uint64_t>(v));
        }
      },
      value.data);
}

// Offsets of the runs that stand for a large tensor.
std::array<std::size_t, hashed_places> places(std::size_t n_bytes) {
  std::array<std::size_t, hashed_places> at;
  for (std::size_t i = 0; i < hashed_places; ++i)
    at[i] = (n_bytes - hashed_run) / (hashed_places - 1) * i;
  at.back() = n_bytes - hashed_run;
  return at;
}

void ask_for(const gguf::Gguf& file) {
  if (file.files().empty()) return;  // in memory
  for (const gguf::TensorInfo& t : file.tensors()) {
    const auto ask = [&](std::size_t at, std::size_t n) {
      file.files()[static_cast<std::size_t>(t.shard)]->advise(t.file_offset + at, n,
                                                              gguf::MappedFile::Advice::will_need);
    };
    if (t.n_bytes <= hashed_whole) {
      ask(0, t.n_bytes);
    } else {
      for (const std::size_t at : places(t.n_bytes)) ask(at, hashed_run);
    }
  }
}

void add_contents(Hash& hash, const gguf::TensorInfo& t) {
  if (t.n_bytes <= hashed_whole) {
    hash.bytes(t.data, t.n_bytes);
  } else {
    for (const std::size_t at : places(t.n_bytes)) hash.bytes(t.data + at, hashed_run);
  }
}

}  // namespace

std::uint64_t model_hash(const Model& model) {
  const gguf::Gguf& file = model.file();
  const std::optional<std::int64_t> seed = model.synthetic_seed();
  if (!seed) ask_for(file);
  Hash hash;
  for (const auto& [key, value] : file.keys().map()) {
    hash.text(key);
    add(hash, value);
  }
  for (const gguf::TensorInfo& t : file.tensors()) {
    hash.text(t.name);
    hash.word(static_cast<std::uint64_t>(t.dtype));
    hash.bytes(t.dims.data(), t.dims.size() * sizeof(std::int64_t));
    if (!seed) add_contents(hash, t);
  }
  for (const TensorSpec& spec : model.arch().tensors(model.hparams()))
    if (spec.role == Role::table)
      hash.word(std::bit_cast<std::uint32_t>(model.weight(spec.name).scale));
  hash.word(seed ? 1 : 0);
  hash.word(static_cast<std::uint64_t>(seed.value_or(0)));
  return hash.value();
}

}  // namespace imp
