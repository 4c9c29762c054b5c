// A fixed header, a checksum over everything, no count trusted.
#include "cpp/runtime/snapshot.h"

#include <array>
#include <bit>
#include <cstring>

#include "cpp/core/error.h"
#include "cpp/core/hash.h"

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

std::uint64_t checksum(Head head, std::span<const std::byte> body) {
  head.checksum = 0;
  Hash hash;
  hash.bytes(&head, sizeof(head));
  hash.bytes(body.data(), body.size());
  return hash.value();
}

}  // namespace

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
