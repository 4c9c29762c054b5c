// The CPU backend with a counter and failures on demand, or one that asks for padding, which the
// CPU does not take: its steps are looked at and not run.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "cpp/core/error.h"
#include "cpp/runtime/backend.h"

namespace imp::test {

class FakeBackend final : public Backend {
 public:
  int compiled = 0;
  bool fail_compile = false;
  bool fail_run = false;
  std::vector<std::int64_t> buckets;
  StepInputs seen;  // of the last step, if there are buckets

  BackendInfo info() const override {
    BackendInfo info = real_->info();
    info.buckets = buckets;
    return info;
  }
  Block alloc(std::size_t bytes, const char* what) override { return real_->alloc(bytes, what); }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    real_->copy(to, from, bytes);
  }
  void fill(std::byte* p, std::size_t bytes, std::byte value) override {
    real_->fill(p, bytes, value);
  }
  void sync() override { real_->sync(); }
  std::unique_ptr<Executable> compile(std::shared_ptr<const Graph> graph, Plan plan,
                                      std::int64_t context) override {
    if (fail_compile) fail(ErrorCode::out_of_memory, "no memory to compile");
    ++compiled;
    return std::make_unique<Fake>(*this,
                                  real_->compile(std::move(graph), std::move(plan), context));
  }

 private:
  class Fake final : public Executable {
   public:
    Fake(FakeBackend& owner, std::unique_ptr<Executable> real)
        : owner_(owner), real_(std::move(real)) {}
    void run(const StepInputs& step, const StepMemory& memory,
             const std::function<void(std::size_t)>& after) override {
      if (owner_.fail_run) fail(ErrorCode::out_of_memory, "no memory to run");
      owner_.seen = step;
      if (owner_.buckets.empty()) real_->run(step, memory, after);
    }
    const float* data(Tensor t, std::int64_t first, std::int64_t rows) const override {
      return real_->data(t, first, rows);
    }
    std::shared_ptr<const void> memory() const override { return real_->memory(); }

   private:
    FakeBackend& owner_;
    std::unique_ptr<Executable> real_;
  };
  std::shared_ptr<Backend> real_ = make_cpu_backend({1, "generic"});
};

}  // namespace imp::test
