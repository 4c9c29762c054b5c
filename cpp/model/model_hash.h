// Tells models apart whose states do not fit each other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpp/model/model.h"

namespace imp {

// Of a larger tensor these bytes count: `hashed_places` runs of `hashed_run`, evenly spread, the
// first and the last included. Tensors up to `hashed_whole` count with every byte.
inline constexpr std::size_t hashed_whole = std::size_t{16} << 10;
inline constexpr std::size_t hashed_run = 512;
inline constexpr std::size_t hashed_places = 8;

// Of the metadata keys, of the names, types and shapes of all tensors, of their contents as above,
// and of the scales that multiply the n-gram tables. Synthetic weights count by their seed. A file
// that was changed by hand between the places has the hash of the original.
std::uint64_t model_hash(const Model& model);

}  // namespace imp
