// Which storage types the cache of keys and values may have.
#pragma once

#include <string>

#include "cpp/model/hparams.h"
#include "cpp/ops/step.h"
#include "cpp/runtime/backend.h"

namespace imp {

// By name, as llama.cpp writes them: f32, f16, bf16 or q8_0. Fails (unsupported) for any other.
DType cache_type(const std::string& name);
std::string cache_type_name(DType type);
std::string describe(CacheTypes types);  // "f16 keys and q8_0 values"

// Fails (unsupported) if the model's heads are not whole blocks, or the backend lacks a type.
void check_cache_types(CacheTypes types, const HParams& h);
void check_cache_types(CacheTypes types, const BackendInfo& backend);

}  // namespace imp
