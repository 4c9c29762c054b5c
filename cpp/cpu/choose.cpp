// The choice of a kernel table by processor.
#include "cpp/cpu/choose.h"

#include "cpp/core/error.h"
#include "cpp/core/sysinfo.h"

namespace imp::cpu {

const Kernels& choose_kernels(const std::string& wanted) {
#if defined(__x86_64__)
  const CpuFeatures f = cpu_features();
  if (wanted == "avx512" || (wanted == "auto" && f.avx512)) {
    if (!f.avx512)
      fail(ErrorCode::unsupported,
           str("avx512 kernels asked for, but this processor has ", describe(f)));
    return avx512_kernels;
  }
  if (wanted == "avx2" || (wanted == "auto" && f.avx2)) {
    if (!f.avx2)
      fail(ErrorCode::unsupported,
           str("avx2 kernels asked for, but this processor has ", describe(f)));
    return avx2_kernels;
  }
#endif
  if (wanted == "auto" || wanted == "generic") return generic_kernels;
  fail(ErrorCode::invalid_argument, str("kernels '", wanted, "': auto, generic, avx2 or avx512"));
}

}  // namespace imp::cpu
