// The CUDA half of the seam: memory, copies, and graphs compiled for one device.
#include "cpp/runtime/backend.h"

#include <vector>

#include "cpp/core/error.h"
#include "cuda/device.h"
#include "cuda/executable.h"
#include "cuda/run.h"

namespace imp {
namespace {

using cuda::check;

// Device memory of a session. Freeing waits for the device, so after a step that did not end
// nothing is freed: the process keeps it.
struct Allocation {
  std::shared_ptr<cuda::Shared> shared;
  cuda::DeviceMemory memory;
  Allocation(std::shared_ptr<cuda::Shared> s, cuda::DeviceMemory m)
      : shared(std::move(s)), memory(std::move(m)) {}
  ~Allocation() {
    if (shared->watch.lost()) memory.leak();
  }
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(const CudaOptions& options, std::shared_ptr<cuda::WeightStore> weights,
              std::string detail)
      : shared_(std::make_shared<cuda::Shared>(options, std::move(weights))),
        detail_(std::move(detail)) {
    const cuda::lt::Found& found = cuda::lt::usual();
    if (options.batch_invariant || !options.cublas_lt || found.library == nullptr) {
      detail_ += ", without cuBLASLt";
    } else {
      shared_->cublas = std::make_unique<cuda::CublasLt>(*found.library);
      detail_ += str(", cuBLASLt ", found.detail);
    }
  }
  ~CudaBackend() override {
    if (shared_->watch.lost()) new std::shared_ptr(shared_);  // see Allocation
  }

  BackendInfo info() const override {
    BackendInfo info{"cuda", detail_, {DType::f32, DType::f16, DType::bf16}};
    if (shared_->options.graphs)
      info.buckets = {1, 2, 4, 8, 16, 24, 32, 48, cuda::most_captured_rows};
    return info;
  }

  Block alloc(std::size_t bytes, const char* what) override {
    shared_->enter();
    auto block = std::make_shared<Allocation>(shared_, cuda::device_memory(bytes, what));
    std::byte* data = block->memory.data();
    if (bytes > 0) check(cudaMemsetAsync(data, 0, bytes, stream()), "cudaMemsetAsync");
    sync();
    return {std::move(block), data};
  }

  // Either side may be on the host.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    shared_->enter();
    if (bytes == 0) return;
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()), "cudaMemcpyAsync");
    if (on_host(to) || on_host(from)) sync();
  }

  void fill(std::byte* p, std::size_t bytes, std::byte value) override {
    shared_->enter();
    check(cudaMemsetAsync(p, std::to_integer<int>(value), bytes, stream()), "cudaMemsetAsync");
  }

  std::unique_ptr<Executable> compile(std::shared_ptr<const Graph> graph, Plan plan,
                                      std::int64_t context) override {
    return cuda::make_executable(shared_, std::move(graph), std::move(plan), context);
  }

  ExpertStats expert_stats() override {
    shared_->enter();
    return shared_->cached == nullptr ? ExpertStats{} : shared_->cached->stats(stream());
  }

  ExpertCheck verify_experts() override {
    shared_->enter();
    return shared_->cached == nullptr ? ExpertCheck{} : shared_->cached->verify(stream());
  }

  void damage_slot(std::int64_t slot) override {
    shared_->enter();
    if (shared_->cached != nullptr) shared_->cached->damage(slot, stream());
  }

  void sync() override {
    shared_->enter();
    shared_->watch.wait(stream());
  }

 private:
  cudaStream_t stream() const { return shared_->stream.get(); }
  static bool on_host(const void* p) {
    cudaPointerAttributes a;
    check(cudaPointerGetAttributes(&a, p), "cudaPointerGetAttributes");
    return a.type != cudaMemoryTypeDevice;
  }

  std::shared_ptr<cuda::Shared> shared_;
  std::string detail_;
};

}  // namespace

std::shared_ptr<Backend> make_cuda_backend(const CudaOptions& options,
                                           const std::shared_ptr<CudaWeights>& weights) {
  const cuda::Devices all = cuda::find_devices();
  if (all.list.empty()) fail(ErrorCode::unsupported, str("CUDA cannot be used: ", all.problem));
  const int n = static_cast<int>(all.list.size());
  if (options.device < 0 || options.device >= n)
    fail(ErrorCode::invalid_argument,
         str("CUDA device ", options.device, ", this machine has ", n));
  const cuda::Device& d = all.list[static_cast<std::size_t>(options.device)];
  if (!d.has_code) fail(ErrorCode::unsupported, cuda::no_code(d));
  check(cudaSetDevice(options.device), "cudaSetDevice");
  return std::make_shared<CudaBackend>(
      options, weights ? weights->store() : std::make_shared<cuda::WeightStore>(),
      cuda::describe(d, all));
}

}  // namespace imp
