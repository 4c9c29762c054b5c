// Activations that a model can ask for. C++20-clean.
#pragma once

#include <cstdint>

namespace imp {

enum class Act : std::uint8_t { none, silu, sigmoid };

}  // namespace imp
