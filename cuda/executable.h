// A planned graph on the device: nodes launched in order, or captured once and replayed.
#pragma once

#include <memory>
#include <vector>

#include "cpp/runtime/backend.h"
#include "cuda/cublas_lt.h"
#include "cuda/handles.h"
#include "cuda/step_inputs.h"
#include "cuda/watchdog.h"
#include "cuda/weights.h"

namespace imp::cuda {

inline constexpr std::int64_t most_captured_rows = 64;  // larger steps gain nothing from replay

// One allocation that grows to the largest request; contents are lost when it does.
class Workspace {
 public:
  std::byte* at_least(std::size_t bytes, const char* what, cudaStream_t stream, Watchdog& watch) {
    if (bytes > memory_.size()) {
      watch.wait(stream);
      memory_ = {};
      memory_ = device_memory(bytes, what);
      ++generation_;
    }
    return memory_.data();
  }
  int generation() const { return generation_; }

 private:
  DeviceMemory memory_;
  int generation_ = 0;
};

// Host copies of the last run's tensors.
struct Results {
  std::vector<PinnedMemory> blocks;
  std::size_t used = 0;
};

// What the executables of one backend share. They run one at a time.
struct Shared {
  Shared(const CudaOptions& o, std::shared_ptr<WeightStore> w)
      : options(o), watch(o.step_timeout), weights(std::move(w)) {}
  const CudaOptions options;
  Watchdog watch;
  Stream stream = make_stream();
  const std::shared_ptr<WeightStore> weights;
  std::unique_ptr<CachedExperts> cached;
  std::unique_ptr<CublasLt> cublas;  // absent: not found, or not to be used
  Workspace arena, scratch;
  StepBlock step;
  std::shared_ptr<Results> results = std::make_shared<Results>();

  // CUDA calls act on the calling thread's current device.
  void enter() const {
    watch.check_alive();
    check(cudaSetDevice(options.device), "cudaSetDevice");
  }
};

std::unique_ptr<Executable> make_executable(std::shared_ptr<Shared>, std::shared_ptr<const Graph>,
                                            Plan, std::int64_t context);

// Device memory that a node needs while it runs; also where the limits of kernels are checked.
// `cublas`: large maps may take cuBLASLt.
std::size_t node_scratch_bytes(const Graph&, const Op&, std::int64_t context, bool cublas);

}  // namespace imp::cuda
