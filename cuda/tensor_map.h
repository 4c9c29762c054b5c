// Tensors in device memory as tensor copies (common/bulk.cuh) see them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace imp::cuda {

struct Dimension {
  std::int64_t size, stride, box;  // elements, bytes from one to the next, elements of a box
};

// Of dimensions from the innermost on, whose elements adjoin; the address and the other strides are
// multiples of 16. Fails (internal) if the driver refuses.
CUtensorMap tensor_map(const void* data, CUtensorMapDataType, CUtensorMapSwizzle,
                       const Dimension (&)[3]);

}  // namespace imp::cuda
