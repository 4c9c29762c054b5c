// Which kernel table runs on this processor.
#pragma once

#include <string>

#include "cpp/cpu/kernels/kernels.h"

namespace imp::cpu {

// "auto" takes the best; "generic", "avx2" and "avx512" ask for one. Fails with unsupported if the
// processor lacks it, naming what it has.
const Kernels& choose_kernels(const std::string& wanted);

}  // namespace imp::cpu
