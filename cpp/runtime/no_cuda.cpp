// The CUDA half of the seam in builds without it.
#include "cpp/core/error.h"
#include "cpp/runtime/backend.h"

namespace imp {
namespace {

constexpr const char* reason = "this build has no CUDA code (IMP_CUDA=OFF)";

}  // namespace

CudaStatus cuda_status() { return {false, false, reason}; }

CublasLtStatus cublas_lt_status(const std::string&) { return {false, reason}; }

class CudaWeights {};
std::shared_ptr<CudaWeights> make_cuda_weights() { return std::make_shared<CudaWeights>(); }
WeightBytes weight_bytes(const CudaWeights&) { return {}; }

std::shared_ptr<Backend> make_cuda_backend(const CudaOptions&,
                                           const std::shared_ptr<CudaWeights>&) {
  fail(ErrorCode::unsupported, str("CUDA cannot be used: ", reason));
}

}  // namespace imp
