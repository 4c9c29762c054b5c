// Names and checks of cache types.
#include "cpp/memory/cache_types.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "cpp/core/error.h"

namespace imp {
namespace {

struct Named {
  std::string_view name;
  DType type;
};
constexpr std::array<Named, 4> known = {
    {{"f32", DType::f32}, {"f16", DType::f16}, {"bf16", DType::bf16}, {"q8_0", DType::q8_0}}};

}  // namespace

DType cache_type(const std::string& name) {
  for (const Named& n : known)
    if (n.name == name) return n.type;
  fail(ErrorCode::unsupported,
       str("cache type ", name, " is not supported, only f32, f16, bf16 and q8_0"));
}

std::string cache_type_name(DType type) {
  for (const Named& n : known)
    if (n.type == type) return std::string(n.name);
  return std::string(type_info(type).name);
}

std::string describe(CacheTypes types) {
  return str(cache_type_name(types.k), " keys and ", cache_type_name(types.v), " values");
}

void check_cache_types(CacheTypes types, const HParams& h) {
  for (const DType type : {types.k, types.v}) {
    const std::int64_t block = type_info(type).block_elems, dim = h.attention.head_dim;
    if (dim % block != 0)
      fail(ErrorCode::unsupported,
           str("cache type ", cache_type_name(type), " needs heads of a multiple of ", block,
               " dimensions, the model's have ", dim));
  }
}

void check_cache_types(CacheTypes types, const BackendInfo& backend) {
  for (const DType type : {types.k, types.v}) {
    if (std::ranges::find(backend.cache_types, type) != backend.cache_types.end()) continue;
    std::string names;
    for (const DType t : backend.cache_types)
      names += (names.empty() ? "" : ", ") + cache_type_name(t);
    fail(ErrorCode::unsupported, str(backend.name, ": cache type ", cache_type_name(type),
                                     " is not supported, only ", names));
  }
}

}  // namespace imp
