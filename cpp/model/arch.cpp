// The list of architectures.
#include "cpp/model/arch.h"

#include "cpp/model/qwen4_exp.h"

namespace imp {
namespace {
const Arch* const list[] = {&qwen4_exp};
}

std::span<const Arch* const> archs() { return list; }

const Arch* find_arch(std::string_view name) {
  for (const Arch* a : list)
    if (a->name == name) return a;
  return nullptr;
}

std::string scale_name(std::string_view weight_name) {
  constexpr std::string_view suffix = ".weight";
  if (weight_name.ends_with(suffix)) weight_name.remove_suffix(suffix.size());
  return std::string(weight_name) + ".scale";
}

}  // namespace imp
