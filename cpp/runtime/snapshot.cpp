// A fixed header, a checksum over everything, no count trusted.
#include "cpp/runtime/snapshot.h"

#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

#include "cpp/core/error.h"

namespace imp {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::array<char, 8> magic = {'I', 'M', 'P', 'S', 'N', 'A', 'P', '\0'};

struct Head {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint16_t type_k, type_v;
  std::uint64_t model;
  std::uint64_t tokens;
  std::uint64_t state_bytes;
  std::uint64_t checksum;
};
static_assert(sizeof(Head) == 48);

// Each step is a bijection of the state and of the word, so any one changed word shows.
class Hash {
 public:
  void word(std::uint64_t w) { h_ = std::rotl((h_ ^ w) * 0x9e3779b97f4a7c15u, 29); }
  void bytes(const void* p, std::size_t n) {
    const auto* at = static_cast<const char*>(p);
    word(n);
    for (; n >= 8; n -= 8, at += 8) {
      std::uint64_t w;
      std::memcpy(&w, at, 8);
      word(w);
    }
    std::uint64_t rest = 0;
    std::memcpy(&rest, at, n);
    if (n > 0) word(rest);
  }
  void text(std::string_view s) { bytes(s.data(), s.size()); }
  std::uint64_t value() const { return h_ ^ (h_ >> 32); }

 private:
  std::uint64_t h_ = 0x243f6a8885a308d3u;
};

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

std::uint64_t checksum(Head head, std::span<const std::byte> body) {
  head.checksum = 0;
  Hash hash;
  hash.bytes(&head, sizeof(head));
  hash.bytes(body.data(), body.size());
  return hash.value();
}

}  // namespace

std::uint64_t model_hash(const Model& model) {
  Hash hash;
  for (const auto& [key, value] : model.file().keys().map()) {
    hash.text(key);
    add(hash, value);
  }
  for (const gguf::TensorInfo& t : model.file().tensors()) {
    hash.text(t.name);
    hash.word(static_cast<std::uint64_t>(t.dtype));
    hash.bytes(t.dims.data(), t.dims.size() * sizeof(std::int64_t));
  }
  return hash.value();
}

std::vector<std::byte> pack(const Snapshot& s) {
  const std::size_t token_bytes = s.tokens.size() * sizeof(std::int32_t);
  std::vector<std::byte> out(sizeof(Head) + token_bytes + s.state.size());
  if (token_bytes > 0) std::memcpy(out.data() + sizeof(Head), s.tokens.data(), token_bytes);
  if (!s.state.empty())
    std::memcpy(out.data() + sizeof(Head) + token_bytes, s.state.data(), s.state.size());
  Head head{magic,
            snapshot_version,
            static_cast<std::uint16_t>(s.types.k),
            static_cast<std::uint16_t>(s.types.v),
            s.model,
            s.tokens.size(),
            s.state.size(),
            0};
  head.checksum = checksum(head, std::span(out).subspan(sizeof(Head)));
  std::memcpy(out.data(), &head, sizeof(Head));
  return out;
}

Snapshot unpack(std::span<const std::byte> bytes, const std::string& name) {
  const auto bad = [&](const std::string& why) { fail(ErrorCode::bad_file, str(name, ": ", why)); };
  if (bytes.size() < sizeof(Head) || std::memcmp(bytes.data(), magic.data(), magic.size()) != 0)
    bad(str("not a snapshot (", bytes.size(), " bytes)"));
  Head head;
  std::memcpy(&head, bytes.data(), sizeof(Head));
  if (head.version != snapshot_version)
    bad(str("snapshot version ", head.version, ", imp reads ", snapshot_version));
  const std::uint64_t body = bytes.size() - sizeof(Head);
  if (head.tokens > body / sizeof(std::int32_t) ||
      head.state_bytes != body - head.tokens * sizeof(std::int32_t))
    bad(str("a snapshot of ", head.tokens, " tokens and ", head.state_bytes, " bytes of state in ",
            bytes.size(), " bytes"));
  if (head.checksum != checksum(head, bytes.subspan(sizeof(Head))))
    bad("a damaged snapshot: its checksum is wrong");
  for (const std::uint16_t type : {head.type_k, head.type_v})
    if (find_type(type) == nullptr) bad(str("a snapshot with cache type id ", type));
  Snapshot s{head.model,
             std::vector<std::int32_t>(head.tokens),
             {},
             {static_cast<DType>(head.type_k), static_cast<DType>(head.type_v)}};
  const std::byte* at = bytes.data() + sizeof(Head);
  if (head.tokens > 0) std::memcpy(s.tokens.data(), at, head.tokens * sizeof(std::int32_t));
  at += head.tokens * sizeof(std::int32_t);
  s.state.assign(at, at + head.state_bytes);
  return s;
}

}  // namespace imp
