// A sequence outside of its session: as a value, and as bytes that can be checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cpp/model/model_hash.h"
#include "cpp/ops/step.h"

namespace imp {

struct Snapshot {
  std::uint64_t model = 0;  // model_hash() of what made it
  std::vector<std::int32_t> tokens;
  std::vector<std::byte> state;  // see SequenceMemory::save
  CacheTypes types;              // of the pages in `state`
};

inline constexpr std::uint32_t snapshot_version = 1;

// Bytes, little endian: magic, version, cache types, model, tokens, state bytes, checksum of all
// that follows and of the header before it; then token ids (i32) and state.
std::vector<std::byte> pack(const Snapshot& snapshot);
// Fails (bad_file) with one sentence that begins with `name` if the bytes are not whole and intact.
Snapshot unpack(std::span<const std::byte> bytes, const std::string& name);

}  // namespace imp
