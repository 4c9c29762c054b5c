// What a CPU op sees while it runs: the plan's memory, the step's inputs, the sequences' state,
// kernels and threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpp/core/threads.h"
#include "cpp/cpu/kernels/kernels.h"
#include "cpp/graph/graph.h"
#include "cpp/ops/step.h"

namespace imp::cpu {

class Context {
 public:
  Context(const Graph& graph, const Plan& plan, std::byte* arena, float* scratch,
          std::size_t scratch_floats, const Kernels& kernels, ThreadPool& pool,
          const StepInputs& step, const StepMemory& memory)
      : k(kernels),
        pool(pool),
        step(step),
        memory(memory),
        graph_(graph),
        plan_(plan),
        arena_(arena),
        scratch_(scratch),
        scratch_floats_(scratch_floats) {}

  const Kernels& k;
  ThreadPool& pool;
  const StepInputs& step;
  const StepMemory& memory;

  const TensorInfo& info(Tensor t) const { return graph_.info(t); }
  std::int64_t rows(Tensor t) const { return info(t).rows; }
  std::int64_t cols(Tensor t) const { return info(t).cols; }
  float* f32(Tensor t) const {
    return reinterpret_cast<float*>(arena_ + plan_.offsets[static_cast<std::size_t>(t.id)]);
  }
  std::int32_t* i32(Tensor t) const { return reinterpret_cast<std::int32_t*>(f32(t)); }
  float* row(Tensor t, std::int64_t r) const { return f32(t) + r * cols(t); }

  // This thread's own workspace, as large as scratch_floats(op) asked for.
  float* scratch(int thread) const {
    return scratch_ + static_cast<std::size_t>(thread) * scratch_floats_;
  }

  // f(first row, end row) over blocks of rows, on several threads if there is enough to do.
  template <class F>
  void over_rows(std::int64_t rows, std::int64_t cols, F f) const {
    constexpr std::int64_t worth_a_task = 16384;  // elements
    const std::int64_t block =
        std::max<std::int64_t>(1, worth_a_task / std::max<std::int64_t>(1, cols));
    pool.parallel_for((rows + block - 1) / block, [&](std::int64_t task, int thread) {
      f(task * block, std::min(rows, (task + 1) * block), thread);
    });
  }

 private:
  const Graph& graph_;
  const Plan& plan_;
  std::byte* arena_;
  float* scratch_;
  std::size_t scratch_floats_;
};

}  // namespace imp::cpu
