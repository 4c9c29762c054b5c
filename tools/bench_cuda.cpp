// Times CUDA ops at the released model's shapes, each as a replayed graph over enough copies of its
// weights that the second cache does not hold them: microseconds a call, GB/s of what it must read,
// and for linear maps TFLOP/s. Usage: imp_bench_cuda [--own] [rows ...]
// --own: linear maps by imp's own kernels alone.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpp/core/error.h"
#include "cpp/graph/graph.h"
#include "cpp/runtime/backend.h"

namespace {

using namespace imp;

constexpr std::int64_t hidden = 2560, wide = 10240, vocab = 248320;
constexpr double least_bytes = 6e8;  // of all copies

// One host block that every weight is cut out of, at different offsets: the store tells them apart
// by address.
class Bytes {
 public:
  explicit Bytes(std::size_t n) : data_(n) {
    std::mt19937_64 random(1);
    for (std::size_t i = 0; i + 8 <= n; i += 8) {  // every type's numbers stay small
      const std::uint64_t v = random() & 0x3c3f3c3f3c3f3c3full;
      std::memcpy(data_.data() + i, &v, 8);
    }
  }
  const std::byte* next() { return data_.data() + 256 * used_++; }

 private:
  std::vector<std::byte> data_;
  std::size_t used_ = 0;
};

struct Bench {
  std::shared_ptr<Backend> backend;
  Bytes bytes{std::size_t{1400} << 20};
  std::vector<std::unique_ptr<Weight>> weights;
  std::vector<std::unique_ptr<ExpertBank>> banks;
  StepInputs step;
  StepMemory memory;
  std::vector<std::int32_t> pages;
  std::vector<Block> blocks;

  const Weight* weight(DType type, std::int64_t rows, std::int64_t cols) {
    const std::size_t row = row_bytes(type, cols);
    weights.push_back(std::make_unique<Weight>(Weight{type, rows, cols, row, bytes.next(), 0.01f}));
    return weights.back().get();
  }
  const ExpertBank* bank(std::int64_t experts, std::int64_t rows, std::int64_t cols) {
    const std::size_t row = row_bytes(DType::nvfp4, cols);
    banks.push_back(std::make_unique<ExpertBank>(
        ExpertBank{{DType::nvfp4, rows, cols, row, bytes.next(), 0.01f},
                   experts,
                   row * static_cast<std::size_t>(rows),
                   nullptr}));
    return banks.back().get();
  }
  Vector vector(std::int64_t n) { return {reinterpret_cast<const float*>(bytes.next()), n}; }
  float* floats(std::int64_t n) {
    blocks.push_back(backend->alloc(static_cast<std::size_t>(n) * 4, "benchmark"));
    return reinterpret_cast<float*>(blocks.back().get());
  }

  // `rows` sequences at `position`, one token each.
  void set_rows(std::int64_t rows, std::int64_t position, std::int64_t page_tokens) {
    step = {};
    const std::int64_t n_pages = position / page_tokens + 1;
    pages.resize(static_cast<std::size_t>(rows * n_pages));
    for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<std::int32_t>(i);
    for (std::int64_t t = 0; t < rows; ++t) {
      step.tokens.push_back(static_cast<std::int32_t>(t % 64));
      step.positions.push_back(static_cast<std::int32_t>(position));
      step.chunks.push_back({t, 1, position, t, pages.data() + t * n_pages});
    }
    memory.page_tokens = page_tokens;
  }

  // Rows of numbers without a host copy in the graph.
  Tensor input(Graph& g, std::int64_t rows, std::int64_t cols) {
    const Tensor y = g.tensor(rows, cols);
    g.add(EmbedStreams{weight(DType::bf16, 64, cols), 1, y});
    return y;
  }

  // A further input, one for all copies in a graph.
  Tensor second(Graph& g, std::int64_t rows, std::int64_t cols) {
    if (!second_) second_ = input(g, rows, cols);
    return second_;
  }
  Tensor second_;

  // Seconds of one replay.
  double time(const std::shared_ptr<Graph>& g) {
    const auto executable = backend->compile(g, plan(*g), 1 << 15);
    for (int i = 0; i < 4; ++i) executable->run(step, memory, {});
    backend->sync();
    double best = 1e9;
    for (int round = 0; round < 5; ++round) {
      constexpr int runs = 4;
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < runs; ++i) executable->run(step, memory, {});
      backend->sync();
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
      best = std::min(best, spent.count() / runs);
    }
    return best;
  }

  // add(graph, input) appends one copy; several copies are timed against none.
  void run(const std::string& name, std::int64_t rows, std::int64_t cols, double read_bytes,
           const std::function<void(Graph&, Tensor)>& add, double products = 0) {
    const int copies =
        static_cast<int>(std::min(64.0, std::max(2.0, least_bytes / std::max(1.0, read_bytes))));
    const auto build = [&](int n) {
      auto g = std::make_shared<Graph>();
      second_ = {};
      const Tensor x = input(*g, rows, cols);
      for (int i = 0; i < n; ++i) add(*g, x);
      return g;
    };
    const double seconds = (time(build(copies)) - time(build(0))) / copies;
    std::printf("%-28s rows %3d: %8.2f us", name.c_str(), static_cast<int>(rows), seconds * 1e6);
    if (read_bytes > 0) std::printf("  %6.0f GB/s", read_bytes / seconds * 1e-9);
    if (products > 0) std::printf("  %6.1f TFLOP/s", 2 * products / seconds * 1e-12);
    std::printf("\n");
    std::fflush(stdout);
  }

  // Maps of one input, as many rows as `heights` says.
  void linear(const char* name, DType type, const std::vector<std::int64_t>& heights,
              std::int64_t k, std::int64_t rows) {
    std::int64_t n = 0;
    for (const std::int64_t height : heights) n += height;
    const double size = static_cast<double>(n) * static_cast<double>(row_bytes(type, k));
    run(
        str(name, " ", n, "x", k), rows, k, size,
        [&](Graph& g, Tensor x) {
          Linears op{x, {}};
          for (const std::int64_t height : heights)
            op.parts.push_back({weight(type, height, k), g.tensor(rows, height), 1, Act::none});
          g.add(std::move(op));
        },
        static_cast<double>(n * k * rows));
  }
};

void bench_linear(Bench& b, std::int64_t rows) {
  b.set_rows(rows, 0, 16);
  const auto bf16 = DType::bf16;
  constexpr std::int64_t low = 320;
  b.linear("delta net in", bf16, {10240, 6144, 48, 48}, hidden, rows);
  b.linear("out", bf16, {hidden}, 6144, rows);
  b.linear("router and shared up", bf16, {512, 640, 640, 1}, hidden, rows);
  b.linear("router", DType::f32, {512}, hidden, rows);
  b.linear("shared down", bf16, {hidden}, 640, rows);
  b.linear("mix down", bf16, {low, 4}, wide, rows);
  const double mix = static_cast<double>(wide * low);
  const Graph* has_streams = nullptr;
  Tensor n;
  b.run(
      "mix up 10240x320", rows, low, 2 * mix,
      [&](Graph& g, Tensor x) {
        if (has_streams != &g) n = b.input(g, rows, wide);
        has_streams = &g;
        g.add(LinearMix{x, n, b.weight(bf16, wide, low), 4, g.tensor(rows, wide),
                        g.tensor(rows, hidden)});
      },
      mix * static_cast<double>(rows));
  const Graph* reads = nullptr;
  Tensor r, s;
  b.run(
      "residual read", rows, hidden, 4 * mix,
      [&](Graph& g, Tensor y) {
        if (reads != &g) r = b.input(g, rows, wide), s = b.input(g, rows, 4);
        reads = &g;
        ResidualRead op{r, y, s, b.vector(wide), b.weight(bf16, low, wide)};
        op.inject = b.weight(bf16, 4, wide);
        op.up = b.weight(bf16, wide, low);
        op.streams = 4;
        op.eps = 1e-6f;
        op.n = g.tensor(rows, wide);
        op.low = g.tensor(rows, low);
        op.gate = g.tensor(rows, wide);
        op.out = r = g.alias(r);
        op.next_s = s = g.tensor(rows, 4);
        op.x = g.tensor(rows, hidden);
        g.add(op);
      },
      2 * mix * static_cast<double>(rows));
  b.linear("head", bf16, {vocab}, hidden, rows);
  b.linear("delta net in q8_0", DType::q8_0, {10240, 6144, 48, 48}, hidden, rows);
  b.linear("delta net in f8", DType::f8_e4m3, {10240, 6144, 48, 48}, hidden, rows);
}

void bench(Bench& b, std::int64_t rows) {
  constexpr std::int64_t context = 4096, page_tokens = 16;
  b.set_rows(rows, context - 1, page_tokens);
  const auto bf16 = DType::bf16;
  b.run("group norm 4x2560", rows, wide, 0, [&](Graph& g, Tensor x) {
    g.add(GroupNorm{x, b.vector(wide), 4, 1e-6f, g.tensor(rows, wide)});
  });
  constexpr std::int64_t experts = 512, used = 10, ff = 640;
  const auto route = [&](Graph& g, Tensor x) {
    const Tensor ids = g.tensor(rows, used, DType::i32);
    g.add(Route{x, used, true, ids, g.tensor(rows, used)});
    return ids;
  };
  b.run("route 512", rows, experts, 0, [&](Graph& g, Tensor x) { route(g, x); });
  const ExpertBank *gate[3], *up[3], *down[3];
  for (int i = 0; i < 3; ++i) {
    gate[i] = b.bank(experts, ff, hidden);
    up[i] = b.bank(experts, ff, hidden);
    down[i] = b.bank(experts, hidden, ff);
  }
  double missed = 1;  // share of experts that no row chose
  for (std::int64_t t = 0; t < rows; ++t) missed *= 1 - static_cast<double>(used) / experts;
  int turn = 0;
  b.run("experts nvfp4 (uniform)", rows, hidden, (1 - missed) * experts * 3 * 921600.0,
        [&](Graph& g, Tensor x) {
          const Tensor logits = g.tensor(rows, experts);
          g.add(Linear{x, b.weight(bf16, experts, hidden), logits, 1, Act::none});
          const Tensor ids = route(g, logits);
          const std::int64_t slots = rows * used;
          const int i = turn++ % 3;
          g.add(ExpertFfn{x, ids, gate[i], up[i], down[i], g.tensor(slots, ff), g.tensor(slots, ff),
                          g.tensor(slots, hidden)});
        });

  constexpr std::int64_t heads = 48, dim = 128, channels = 10240;
  const std::int64_t layers = std::max<std::int64_t>(2, 128 / rows);
  b.memory.state_stride = layers * (heads * dim * dim + 3 * channels);
  b.memory.state = b.floats(rows * b.memory.state_stride);
  std::int64_t layer = 0;
  b.run("delta rule 48x128x128", rows, channels, static_cast<double>(rows * heads * dim * dim) * 8,
        [&](Graph& g, Tensor x) {
          const Tensor gate = b.second(g, rows, heads);
          g.add(DeltaRule{x, gate, gate, b.vector(heads), b.vector(heads), 16, heads, dim, dim,
                          layer++ % layers * heads * dim * dim, g.tensor(rows, 2 * heads),
                          g.tensor(rows, heads * dim)});
        });
  b.run("conv 10240", rows, channels, 0, [&](Graph& g, Tensor x) {
    g.add(ConvSilu{x, b.vector(4 * channels), 4,
                   layers * heads * dim * dim + layer++ % layers * 3 * channels,
                   g.tensor(rows, channels)});
  });

  constexpr std::int64_t kv_heads = 2, head = 256, q_heads = 24;
  const std::int64_t floats = rows * context * kv_heads * head;
  const auto cache = [&] { return reinterpret_cast<std::byte*>(b.floats(floats)); };
  b.memory.kv = {{cache(), cache(), nullptr}};
  b.run("attend 4096", rows, q_heads * head, static_cast<double>(floats) * 8,
        [&](Graph& g, Tensor q) {
          const Tensor qg = b.second(g, rows, 2 * q_heads * head);
          g.add(Attend{
              q, qg, q, {}, 0, q_heads, kv_heads, head, 4, 0, g.tensor(rows, q_heads * head)});
        });
  b.blocks.clear();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    CudaOptions options;
    options.cublas_lt = argc < 2 || std::strcmp(argv[1], "--own") != 0;
    Bench b{make_cuda_backend(options)};
    std::printf("%s\n", b.backend->info().detail.c_str());
    std::vector<std::int64_t> rows;
    for (int i = options.cublas_lt ? 1 : 2; i < argc; ++i) rows.push_back(std::atoll(argv[i]));
    for (const std::int64_t r :
         rows.empty() ? std::vector<std::int64_t>{1, 2, 8, 64, 128, 512} : rows)
      bench_linear(b, r);
    for (const std::int64_t r : rows.empty() ? std::vector<std::int64_t>{1, 8, 64} : rows)
      bench(b, r);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
