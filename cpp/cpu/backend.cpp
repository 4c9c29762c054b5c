// The CPU backend: kernels chosen once, one thread pool, nodes run in order.
#include "cpp/runtime/backend.h"

#include <cstring>

#include "cpp/core/buffer.h"
#include "cpp/core/error.h"
#include "cpp/core/sysinfo.h"
#include "cpp/cpu/choose.h"
#include "cpp/cpu/run.h"

namespace imp {
namespace {

// One allocation that grows to the largest request; contents are lost when it does.
class Workspace {
 public:
  std::byte* at_least(std::size_t bytes, const char* what) {
    if (bytes > buffer_->size()) {
      const MemoryInfo memory = memory_info();
      if (static_cast<std::int64_t>(bytes - buffer_->size()) > memory.available_bytes)
        fail(ErrorCode::out_of_memory,
             str(what, " needs ", bytes, " bytes, ", memory.available_bytes, " are available (",
                 memory.limited_by, ")"));
      buffer_ = std::make_shared<Buffer>();  // the old one goes first, unless somebody reads it
      buffer_ = std::make_shared<Buffer>(bytes, what);
    }
    return buffer_->data();
  }
  std::shared_ptr<const Buffer> memory() const { return buffer_; }

 private:
  std::shared_ptr<Buffer> buffer_ = std::make_shared<Buffer>();
};

struct Shared {
  Shared(int threads, const cpu::Kernels& k) : pool(threads), kernels(k) {}
  ThreadPool pool;
  const cpu::Kernels& kernels;
  Workspace arena, scratch;
};

class CpuExecutable final : public Executable {
 public:
  CpuExecutable(std::shared_ptr<Shared> shared, std::shared_ptr<const Graph> graph, Plan plan,
                std::int64_t context)
      : shared_(std::move(shared)), graph_(std::move(graph)), plan_(std::move(plan)) {
    for (const Node& node : graph_->nodes())
      scratch_floats_ = std::max(scratch_floats_, cpu::scratch_floats(*graph_, node.op, context));
  }

  void run(const StepInputs& step, const StepMemory& memory,
           const std::function<void(std::size_t)>& after) override {
    arena_ = shared_->arena.at_least(plan_.bytes, "activations");
    const std::size_t threads = static_cast<std::size_t>(shared_->pool.size());
    std::byte* scratch =
        shared_->scratch.at_least(threads * scratch_floats_ * sizeof(float), "thread workspace");
    const cpu::Context context(*graph_, plan_, arena_, reinterpret_cast<float*>(scratch),
                               scratch_floats_, shared_->kernels, shared_->pool, step, memory);
    for (std::size_t i = 0; i < graph_->nodes().size(); ++i) {
      std::visit([&](const auto& op) { cpu::run(op, context); }, graph_->nodes()[i].op);
      if (after) after(i);
    }
  }

  const float* data(Tensor t, std::int64_t first, std::int64_t) const override {
    const std::byte* at = arena_ + plan_.offsets[static_cast<std::size_t>(t.id)];
    return reinterpret_cast<const float*>(at) + first * graph_->info(t).cols;
  }
  std::shared_ptr<const void> memory() const override { return shared_->arena.memory(); }

 private:
  std::shared_ptr<Shared> shared_;
  std::shared_ptr<const Graph> graph_;
  Plan plan_;
  std::size_t scratch_floats_ = 16;
  std::byte* arena_ = nullptr;
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const CpuOptions& o)
      : shared_(std::make_shared<Shared>(
            o.threads == 0 ? std::min(usable_processors(), max_threads) : o.threads,
            cpu::choose_kernels(o.kernels))) {}

  BackendInfo info() const override {
    return {"cpu",
            str(shared_->kernels.name, ", ", shared_->pool.size(), " threads"),
            {DType::f32, DType::f16, DType::bf16, DType::q8_0}};
  }
  Block alloc(std::size_t bytes, const char* what) override {
    const auto buffer = std::make_shared<Buffer>(bytes, what);
    return {buffer, buffer->data()};
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void fill(std::byte* p, std::size_t bytes, std::byte value) override {
    std::memset(p, std::to_integer<int>(value), bytes);
  }
  std::unique_ptr<Executable> compile(std::shared_ptr<const Graph> graph, Plan plan,
                                      std::int64_t context) override {
    return std::make_unique<CpuExecutable>(shared_, std::move(graph), std::move(plan), context);
  }
  void sync() override {}

 private:
  std::shared_ptr<Shared> shared_;
};

}  // namespace

std::shared_ptr<Backend> make_cpu_backend(const CpuOptions& options) {
  return std::make_shared<CpuBackend>(options);
}

}  // namespace imp
