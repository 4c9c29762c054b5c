// Eager runs, and capture of small steps: the second run of a shape records its launches, later
// ones replay them. Values that change from step to step live in the step block. Steps of one-row
// chunks are captured apart from others of their shape.
#include "cuda/executable.h"

#include <algorithm>
#include <cstring>

#include "cuda/run.h"

namespace imp::cuda {
namespace {

// All addresses that a capture has baked in.
struct Addresses {
  int arena = 0, scratch = 0, step = 0;
  const float* state = nullptr;
  const std::byte* keys = nullptr;
  friend bool operator==(const Addresses&, const Addresses&) = default;
};

std::vector<ExpertLayer> expert_layers(const Graph& graph) {
  std::vector<ExpertLayer> layers;
  for (const Node& node : graph.nodes()) {
    if (const auto* ffn = std::get_if<ExpertFfn>(&node.op))
      layers.push_back({{ffn->gate, ffn->up, ffn->down}});
    if (const auto* moe = std::get_if<MoeFfn>(&node.op))
      layers.push_back({{moe->gate, moe->up, moe->down}});
  }
  return layers;
}

class CudaExecutable final : public Executable {
 public:
  CudaExecutable(std::shared_ptr<Shared> shared, std::shared_ptr<const Graph> graph, Plan plan,
                 std::int64_t context)
      : shared_(std::move(shared)),
        graph_(std::move(graph)),
        plan_(std::move(plan)),
        context_(context),
        tables_(host_tables(*graph_)) {
    shared_->enter();
    if (shared_->options.expert_slots >= 0 && shared_->cached == nullptr)
      shared_->cached = std::make_unique<CachedExperts>(expert_layers(*graph_), shared_->options,
                                                        *shared_->weights, shared_->stream.get());
    shared_->weights->add(*graph_, shared_->cached.get());
    for (const Node& node : graph_->nodes()) {
      scratch_bytes_ = std::max(scratch_bytes_, node_scratch_bytes(*graph_, node.op, context_,
                                                                   shared_->cublas != nullptr));
      if (std::holds_alternative<Feed>(node.op)) capturable_ = false;
    }
  }

  ~CudaExecutable() override {
    if (!shared_->watch.lost()) return;
    decode_.program.leak();
    mixed_.program.leak();
  }

  void run(const StepInputs& step, const StepMemory& memory,
           const std::function<void(std::size_t)>& after) override {
    shared_->enter();
    const cudaStream_t stream = shared_->stream.get();
    CachedExperts* checked = shared_->options.verify_experts ? shared_->cached.get() : nullptr;
    shared_->results->used = 0;
    shared_->step.upload(step, memory, tables_, stream, shared_->watch);
    shared_->watch.begin(shared_->step.rows());
    if (checked != nullptr) checked->begin_step(stream);
    start(memory, after);
    if (checked == nullptr) return;
    shared_->watch.wait(stream);
    checked->check_step(stream);
  }

  const float* data(Tensor t, std::int64_t first, std::int64_t rows) const override {
    shared_->enter();
    const TensorView& view = views_[static_cast<std::size_t>(t.id)];
    const auto row_bytes = static_cast<std::size_t>(view.cols) * 4;
    const std::size_t bytes = static_cast<std::size_t>(rows) * row_bytes;
    float* to = result(bytes);
    const cudaStream_t stream = shared_->stream.get();
    if (bytes > 0)
      check(cudaMemcpyAsync(to, view.data + static_cast<std::size_t>(first) * row_bytes, bytes,
                            cudaMemcpyDeviceToHost, stream),
            "cudaMemcpyAsync");
    shared_->watch.wait(stream);
    return to;
  }
  std::shared_ptr<const void> memory() const override { return shared_->results; }

 private:
  // Launches the step, or replays it.
  void start(const StepMemory& memory, const std::function<void(std::size_t)>& after) {
    const cudaStream_t stream = shared_->stream.get();
    bind(memory);
    if (!shared_->options.graphs || !capturable_ || after ||
        shared_->step.rows() > most_captured_rows)
      return launch(after);

    // Grids cover as many chunks as there are rows, whatever this step holds.
    c_.most_chunks = shared_->step.rows();
    auto& [captured_for, program] = c_.one_row_chunks ? decode_ : mixed_;
    const Addresses now{shared_->arena.generation(), shared_->scratch.generation(),
                        shared_->step.generation(), memory.state,
                        memory.kv.empty() ? nullptr : memory.kv.front().k};
    if (!(now == captured_for)) {  // also the first run, which loads the kernels
      program.reset();
      captured_for = now;
      return launch({});
    }
    if (!program) program = capture(stream);
    check(cudaGraphLaunch(program.get(), stream), "cudaGraphLaunch");
  }

  void bind(const StepMemory& memory) {
    const cudaStream_t stream = shared_->stream.get();
    std::byte* arena = shared_->arena.at_least(plan_.bytes, "activations", stream, shared_->watch);
    views_.clear();
    for (std::size_t i = 0; i < graph_->tensors().size(); ++i) {
      const TensorInfo& t = graph_->tensors()[i];
      views_.push_back({arena + plan_.offsets[i], t.rows, t.cols});
    }
    c_ = {};
    c_.stream = stream;
    c_.tensors = views_.data();
    c_.weights = shared_->weights.get();
    c_.cached = shared_->cached.get();
    c_.cublas = shared_->cublas.get();
    c_.step = shared_->step.view();
    c_.most_chunks = shared_->step.chunks();
    c_.one_row_chunks = shared_->step.one_row_chunks();
    c_.kv = memory.kv.data();
    c_.types = memory.types;
    c_.tables = shared_->step.tables();
    c_.context = context_;
    c_.batch_invariant = shared_->options.batch_invariant;
    c_.scratch =
        shared_->scratch.at_least(scratch_bytes_, "kernel workspace", stream, shared_->watch);
  }

  void launch(const std::function<void(std::size_t)>& after) {
    for (std::size_t i = 0; i < graph_->nodes().size(); ++i) {
      std::visit([this](const auto& op) { cuda::run(op, c_); }, graph_->nodes()[i].op);
      if (!after) continue;
      shared_->results->used = 0;
      after(i);
    }
  }

  GraphProgram capture(cudaStream_t stream) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
      launch({});
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      const CapturedGraph dropped(graph);
      throw;
    }
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    const CapturedGraph captured(graph);
    cudaGraphExec_t program = nullptr;
    check(cudaGraphInstantiate(&program, graph, 0), "cudaGraphInstantiate");
    return GraphProgram(program);
  }

  // The next unused host block of the run that has room, else a new one.
  float* result(std::size_t bytes) const {
    auto& [blocks, used] = *shared_->results;
    std::size_t i = used;
    while (i < blocks.size() && blocks[i].size() < bytes) ++i;
    if (i == blocks.size()) {
      constexpr std::size_t least = std::size_t{1} << 16;
      blocks.push_back(pinned_memory(std::max(least, bytes), "results"));
    }
    std::swap(blocks[used], blocks[i]);
    return reinterpret_cast<float*>(blocks[used++].data());
  }

  std::shared_ptr<Shared> shared_;
  std::shared_ptr<const Graph> graph_;
  Plan plan_;
  std::int64_t context_;
  std::vector<TableRows> tables_;
  std::size_t scratch_bytes_ = 256;
  bool capturable_ = true;
  std::vector<TensorView> views_;
  Context c_;
  struct Capture {
    Addresses captured_for;
    GraphProgram program;
  };
  Capture decode_, mixed_;
};

}  // namespace

std::unique_ptr<Executable> make_executable(std::shared_ptr<Shared> shared,
                                            std::shared_ptr<const Graph> graph, Plan plan,
                                            std::int64_t context) {
  return std::make_unique<CudaExecutable>(std::move(shared), std::move(graph), std::move(plan),
                                          context);
}

}  // namespace imp::cuda
