// The driver's function is found through the runtime, so that a build needs no driver.
#include "cuda/tensor_map.h"

#include "cuda/check.h"

namespace imp::cuda {
namespace {

auto find_encode() {
  constexpr unsigned first_version = 12000;
  void* f = nullptr;
  cudaDriverEntryPointQueryResult result;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, first_version,
                                         cudaEnableDefault, &result),
        "cudaGetDriverEntryPointByVersion");
  if (result != cudaDriverEntryPointSuccess)
    fail(ErrorCode::internal, "the driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
}

}  // namespace

CUtensorMap tensor_map(const void* data, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                       const Dimension (&d)[3]) {
  static const auto encode = find_encode();
  cuuint64_t sizes[3], strides[2];
  cuuint32_t box[3];
  const cuuint32_t steps[] = {1, 1, 1};
  for (int i = 0; i < 3; ++i) {
    sizes[i] = static_cast<cuuint64_t>(d[i].size);
    box[i] = static_cast<cuuint32_t>(d[i].box);
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(d[i].stride);
  }
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, 3, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    fail(ErrorCode::internal, str("cuTensorMapEncodeTiled: error ", static_cast<int>(result)));
  return map;
}

}  // namespace imp::cuda
