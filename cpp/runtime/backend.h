// The seam between the runtime and a device: memory, copies, running a planned graph, and what a
// cache of experts has done.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cpp/graph/graph.h"
#include "cpp/memory/expert_check.h"
#include "cpp/memory/expert_policy.h"
#include "cpp/ops/step.h"

namespace imp {

struct BackendInfo {
  std::string name;                               // "cpu", "cuda"
  std::string detail;                             // instruction set and threads, or the device
  std::vector<DType> cache_types = {DType::f32};  // that its attention reads and writes
  // Rows of decode steps, ascending: others are padded to the next, so that few shapes are
  // compiled. Empty = any number of rows as it is.
  std::vector<std::int64_t> buckets = {};
};

// A graph bound to memory. Not thread-safe; tensors are valid until the next run.
class Executable {
 public:
  virtual ~Executable() = default;
  // `after` (may be empty) is called with each node's index once its results can be read.
  virtual void run(const StepInputs&, const StepMemory&,
                   const std::function<void(std::size_t)>& after) = 0;
  // Rows of a tensor, host-readable.
  virtual const float* data(Tensor, std::int64_t first, std::int64_t rows) const = 0;
  // Whoever holds it can read data() after later runs and the executable's end, though no longer
  // what this run left there. Absent if data() outlives the executable anyway.
  virtual std::shared_ptr<const void> memory() const { return {}; }
};

using Block = std::shared_ptr<std::byte>;

// A cache of experts and what it has done so far; slots 0 = there is none.
struct ExpertStats {
  std::int64_t layers = 0, experts = 0, slots = 0;
  std::int64_t blob_bytes = 0;   // of one expert
  std::int64_t store_bytes = 0;  // pinned on the host
  double pin_seconds = 0, fill_seconds = 0;
  struct Layer {
    std::int64_t wanted = 0, hits = 0, kept = 0;  // distinct experts of steps; misses that entered
    std::int64_t fetch_ns = 0;                    // while misses came from the host
  };
  std::vector<Layer> by_layer;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual BackendInfo info() const = 0;
  // Zeroed memory; fails with out_of_memory naming `what` and both numbers.
  virtual Block alloc(std::size_t bytes, const char* what) = 0;
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  virtual void fill(std::byte* p, std::size_t bytes, std::byte value) = 0;
  // `context`: the longest sequence in tokens that the executable will see.
  virtual std::unique_ptr<Executable> compile(std::shared_ptr<const Graph>, Plan,
                                              std::int64_t context) = 0;
  virtual void sync() = 0;
  virtual ExpertStats expert_stats() { return {}; }
  // Compares the cache of experts and its store with checksums of what was read from the file, and
  // empties slots that differ. Fails (invalid_argument) if none were taken.
  virtual ExpertCheck verify_experts() { return {}; }
  virtual void damage_slot(std::int64_t) {}  // flips a bit of a cached expert, for tests
};

struct CpuOptions {
  int threads = 0;               // 0: as many as the process may use
  std::string kernels = "auto";  // or generic, avx2, avx512
};
std::shared_ptr<Backend> make_cpu_backend(const CpuOptions&);

// A step that takes longer than this fails (timeout), and the session with it.
inline constexpr double usual_step_timeout = 60, max_step_timeout = 86400;  // seconds
inline constexpr std::int64_t step_timeout_rows = 512;  // longer steps may take longer
inline double step_limit(double step_timeout, std::int64_t rows) {
  return step_timeout *
         std::max(1.0, static_cast<double>(rows) / static_cast<double>(step_timeout_rows));
}

struct CudaOptions {
  int device = 0;      // as the driver numbers them
  bool graphs = true;  // capture small steps and replay them
  // A row's bits do not depend on how many rows its step has; otherwise one row alone, and a few,
  // take faster paths whose sums are in other orders.
  bool batch_invariant = false;
  // Experts that device memory holds, of all layers together; the others stay in pinned host
  // memory. -1 = all of them, without a cache.
  std::int64_t expert_slots = -1;
  ExpertPolicy expert_policy;
  std::size_t ram_limit = 0;  // bytes of pinned memory at most; 0 = what the machine has
  // Read the experts twice, and compare the slots with their checksums after every step: a step
  // that used one that differs fails (io).
  bool verify_experts = false;
  double step_timeout = usual_step_timeout;  // seconds of a step of up to step_timeout_rows
  // Kernels that read experts run beside the gather of those that the cache misses, not after it.
  bool overlap_gathers = true;
  bool poison = false;  // fill slots with NaN before experts come into them, for tests
  // Large maps of BF16 weights without kernels of their own go to cuBLASLt where it is found, unless
  // batch_invariant.
  bool cublas_lt = true;
};
// A model's weights on the device, for all backends that are made with it: uploaded once, freed
// with the last backend. One model and one device each.
class CudaWeights;
std::shared_ptr<CudaWeights> make_cuda_weights();
struct WeightBytes {
  std::size_t device = 0, pinned = 0;  // pinned: experts on the host
};
WeightBytes weight_bytes(const CudaWeights&);  // that it holds now
// Fails with `unsupported` and the reason where no CUDA device can be used. `weights`: absent = of
// its own.
std::shared_ptr<Backend> make_cuda_backend(const CudaOptions&,
                                           const std::shared_ptr<CudaWeights>& weights = {});

// Whether a CUDA device can be used, and one line that says what was found or why not.
struct CudaStatus {
  bool built = false;
  bool usable = false;
  std::string detail;
  std::string architectures;                    // that the build holds code for: "sm_90a, sm_120a"
  std::size_t free_bytes = 0, total_bytes = 0;  // of that device's memory
};
CudaStatus cuda_status();

// Whether cuBLASLt is found, and one line: its version and place, or why there is none. `file`:
// a library's name instead of the usual one.
struct CublasLtStatus {
  bool found = false;
  std::string detail;
};
CublasLtStatus cublas_lt_status(const std::string& file = {});

}  // namespace imp
