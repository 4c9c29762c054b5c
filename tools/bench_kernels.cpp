// Times the CPU kernels of every instruction set that this processor has: GB/s of stored weights
// for few rows, GFLOP/s for many. Usage: imp_bench_kernels [threads] [avx512|avx2|generic]
// [section]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpp/core/half.h"
#include "cpp/cpu/kernels/kernels.h"
#include "cpp/quant/quant.h"

namespace {

using imp::DType;
using imp::cpu::Gemm;
using imp::cpu::Kernels;

int n_threads = 1;

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using Array = std::unique_ptr<T[], Free>;
template <class T>
Array<T> make_array(std::size_t n) {
  return Array<T>(static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64)));
}

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Runs f(thread) on all threads; processor time of the slowest thread (other programs on a shared
// machine do not count), median of several rounds.
double seconds(const std::function<void(int)>& f, int rounds = 9) {
  std::vector<double> times;
  for (int r = 0; r < rounds; ++r) {
    std::vector<double> spent(static_cast<std::size_t>(n_threads));
    const auto timed = [&](int t) {
      const double start = cpu_seconds();
      f(t);
      spent[static_cast<std::size_t>(t)] = cpu_seconds() - start;
    };
    std::vector<std::thread> others;
    for (int t = 1; t < n_threads; ++t) others.emplace_back(timed, t);
    timed(0);
    for (std::thread& t : others) t.join();
    times.push_back(*std::max_element(spent.begin(), spent.end()));
  }
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[static_cast<std::size_t>(rounds / 2)];
}

Array<float> random_floats(std::size_t n) {
  auto a = make_array<float>(n);
  std::mt19937 rng(1);
  for (std::size_t i = 0; i < n; ++i) a[i] = static_cast<float>(rng() % 2001) * 1e-3f - 1.0f;
  return a;
}

// `bytes` of plausible weights: one random stretch repeated.
Array<std::byte> random_weights(DType type, std::size_t bytes) {
  auto a = make_array<std::byte>(bytes);
  std::mt19937 rng(2);
  const auto& info = imp::type_info(type);
  const auto unit = static_cast<std::size_t>(info.block_bytes);
  const std::size_t period = std::min(bytes, unit * 65536);
  for (std::size_t i = 0; i < period; ++i) a[i] = static_cast<std::byte>(rng());
  for (std::size_t b = 0; b + unit <= period; b += unit) {
    const float f = static_cast<float>(rng() % 2001) * 1e-3f - 1.0f;
    const std::uint16_t bf16 = imp::float_to_bf16(f), f16 = imp::float_to_half(f);
    if (type == DType::f32) std::memcpy(&a[b], &f, 4);
    if (type == DType::bf16) std::memcpy(&a[b], &bf16, 2);
    if (type == DType::f16 || type == DType::q8_0) std::memcpy(&a[b], &f16, 2);
    if (type == DType::nvfp4)
      for (std::size_t s = 0; s < 4; ++s) a[b + s] = static_cast<std::byte>(0x28 + rng() % 32);
  }
  for (std::size_t i = period; i < bytes; i += period)
    std::memcpy(&a[i], &a[0], std::min(period, bytes - i));
  return a;
}

// y = w x^T for `matrices` weight matrices one after the other, columns split over the threads.
double gemm_seconds(const Kernels& kernels, DType type, std::int64_t rows, std::int64_t n,
                    std::int64_t k, std::int64_t matrices) {
  const std::size_t row = imp::row_bytes(type, k);
  const auto w = random_weights(type, row * static_cast<std::size_t>(n * matrices));
  const auto x = random_floats(static_cast<std::size_t>(rows * k));
  const auto y = make_array<float>(static_cast<std::size_t>(rows * n));
  std::vector<const float*> xs;
  std::vector<float*> ys;
  for (std::int64_t t = 0; t < rows; ++t) {
    xs.push_back(&x[static_cast<std::size_t>(t * k)]);
    ys.push_back(&y[static_cast<std::size_t>(t * n)]);
  }
  std::vector<Array<float>> scratch;
  for (int t = 0; t < n_threads; ++t)
    scratch.push_back(make_array<float>(imp::cpu::gemm_scratch_floats(k)));
  return seconds([&](int t) {
    for (std::int64_t m = 0; m < matrices; ++m) {
      const Gemm g{
          type, &w[static_cast<std::size_t>(m * n) * row], row, k, xs.data(), ys.data(), rows,
          1.0f};
      kernels.gemm(g, n * t / n_threads, n * (t + 1) / n_threads,
                   scratch[static_cast<std::size_t>(t)].get());
    }
  });
}

void few_rows(const Kernels& kernels) {
  std::printf("few rows, weights from memory: GB/s of stored weights (k = 2560)\n%8s", "rows");
  const std::int64_t rows[] = {1, 2, 3, 4, 6, 8, 12, 16};
  for (auto r : rows) std::printf("%8lld", static_cast<long long>(r));
  std::printf("\n");
  for (DType type : {DType::f32, DType::bf16, DType::f16, DType::q8_0, DType::nvfp4}) {
    std::printf("%8s", imp::type_info(type).name.data());
    const std::size_t row = imp::row_bytes(type, 2560);
    const auto n = static_cast<std::int64_t>((std::size_t{256} << 20) / row);
    for (auto r : rows)
      std::printf("%8.1f", static_cast<double>(row) * static_cast<double>(n) /
                               gemm_seconds(kernels, type, r, n, 2560, 1) * 1e-9);
    std::printf("\n");
  }
}

void many_rows(const Kernels& kernels) {
  std::printf("many rows: GFLOP/s\n%8s%8s%8s", "type", "k", "n");
  const std::int64_t rows[] = {16, 64, 128, 512};
  for (auto r : rows) std::printf("%8lld", static_cast<long long>(r));
  std::printf("\n");
  const std::int64_t shapes[][2] = {{2560, 640},  {2560, 12288}, {6144, 2560},
                                    {10240, 320}, {320, 10240},  {640, 2560}};
  for (DType type : {DType::bf16, DType::q8_0})
    for (const auto& [k, n] : shapes) {
      std::printf("%8s%8lld%8lld", imp::type_info(type).name.data(), static_cast<long long>(k),
                  static_cast<long long>(n));
      for (auto r : rows)
        std::printf("%8.1f", 2e-9 * static_cast<double>(r * n * k) /
                                 gemm_seconds(kernels, type, r, n, k, 1));
      std::printf("\n");
    }
}

void experts(const Kernels& kernels) {
  std::printf("experts: NVFP4, 128 matrices from memory, GFLOP/s\n%8s%8s", "k", "n");
  const std::int64_t rows[] = {1, 2, 3, 4, 6, 8, 10, 12, 16, 32};
  for (auto r : rows) std::printf("%8lld", static_cast<long long>(r));
  std::printf("\n");
  const std::int64_t shapes[][2] = {{2560, 640}, {640, 2560}};
  for (const auto& [k, n] : shapes) {
    std::printf("%8lld%8lld", static_cast<long long>(k), static_cast<long long>(n));
    for (auto r : rows)
      std::printf("%8.1f", 2e-9 * static_cast<double>(r * n * k * 128) /
                               gemm_seconds(kernels, DType::nvfp4, r, n, k, 128));
    std::printf("\n");
  }
}

void attention(const Kernels& kernels) {
  constexpr std::int64_t dim = 256, heads = 12;
  for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::q8_0})
    for (std::int64_t n : {64, 512, 2048, 16384}) {
      const auto kv = random_floats(static_cast<std::size_t>(2 * n * dim));
      const auto q = random_floats(heads * dim);
      const std::size_t row = row_bytes(type, dim);
      const auto stored = make_array<std::byte>(static_cast<std::size_t>(2 * n) * row);
      std::vector<const std::byte*> rows[2];  // keys, values
      for (std::int64_t i = 0; i < 2 * n; ++i) {
        std::byte* at = &stored[static_cast<std::size_t>(i) * row];
        encode_row(type, &kv[static_cast<std::size_t>(i * dim)], dim, at);
        rows[i % 2].push_back(at);
      }
      const auto repeats = std::max<std::int64_t>(1, 65536 / n);
      const double s = seconds([&](int) {
        const auto scores = make_array<float>(static_cast<std::size_t>(heads * (n + 16)));
        const auto out = make_array<float>(heads * dim);
        for (std::int64_t r = 0; r < repeats; ++r)
          kernels.attend({type, type, rows[0].data(), rows[1].data(), n}, q.get(), dim, heads, dim,
                         0.0625f, scores.get(), out.get(), dim);
      });
      std::printf("attend: %-4s, %lld heads x %lld, %6lld keys: %8.1f us, %6.1f GFLOP/s a thread\n",
                  std::string(type_info(type).name).c_str(), static_cast<long long>(heads),
                  static_cast<long long>(dim), static_cast<long long>(n),
                  s / static_cast<double>(repeats) * 1e6,
                  4e-9 * static_cast<double>(heads * dim * n * repeats) / s);
    }
}

void recurrent(const Kernels& kernels) {
  constexpr std::int64_t d = 128, steps = 512, channels = 10240;
  const auto v = random_floats(3 * d);
  double s = seconds([&](int) {
    const auto state = random_floats(d * d);
    const auto o = make_array<float>(d);
    const float gates[] = {0.9f, 0.01f};
    kernels.delta_rule({&v[0], &v[d], &v[2 * d], 0, gates, gates + 1, 0, o.get(), 0, steps},
                       state.get(), d, d);
  });
  std::printf("delta_rule 128 x 128: %.2f us a token and head\n", s / steps * 1e6);
  const auto x = random_floats(4 * channels), w = random_floats(4 * channels);
  const float* taps[] = {&x[0], &x[channels], &x[2 * channels], &x[3 * channels]};
  s = seconds([&](int) {
    const auto y = make_array<float>(channels);
    for (int i = 0; i < 100; ++i) kernels.conv_silu(taps, w.get(), 4, y.get(), channels);
  });
  std::printf("conv_silu %lld channels: %.2f us\n", static_cast<long long>(channels), s * 1e4);
}

void elementwise(const Kernels& kernels) {
  constexpr std::int64_t n = 10240;
  const auto a = random_floats(n), b = random_floats(n), open = make_array<float>(n);
  std::fill_n(open.get(), n, 100.0f);  // gates that leave y what it is, call after call
  const auto time = [&](const char* name, const std::function<void(float*)>& f) {
    const double s = seconds([&](int) {
      const auto y = random_floats(n);
      for (int i = 0; i < 300; ++i) f(y.get());
    });
    std::printf("%-24s%8.3f ns an element\n", name, s / 300 / n * 1e9);
  };
  time("silu_mul", [&](float* y) { kernels.silu_mul(a.get(), b.get(), y, n); });
  time("sigmoid_mul", [&](float* y) { kernels.sigmoid_mul(open.get(), y, n); });
  time("axpy", [&](float* y) { kernels.axpy(0.1f, a.get(), y, n); });
  time("rms_norm", [&](float* y) { kernels.rms_norm(a.get(), b.get(), y, n, 1e-6f); });
  time("residual_mix (4 x 2560)",
       [&](float* y) { kernels.residual_mix(a.get(), b.get(), y, 4, n / 4); });
  time("sum_exp", [&](float* y) { y[0] = static_cast<float>(kernels.sum_exp(a.get(), n, 1.0f)); });
  time("max", [&](float* y) { y[0] = kernels.max(a.get(), n); });
}

}  // namespace

int main(int argc, char** argv) {
  n_threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
  const std::string isa = argc > 2 ? argv[2] : "", section = argc > 3 ? argv[3] : "";
  std::vector<const Kernels*> tables;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    tables.push_back(&imp::cpu::avx512_kernels);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    tables.push_back(&imp::cpu::avx2_kernels);
#endif
  tables.push_back(&imp::cpu::generic_kernels);
  const std::pair<const char*, void (*)(const Kernels&)> sections[] = {
      {"few", few_rows},        {"many", many_rows},      {"experts", experts},
      {"attention", attention}, {"recurrent", recurrent}, {"elementwise", elementwise}};
  for (const Kernels* kernels : tables) {
    if (!isa.empty() && isa != kernels->name) continue;
    std::printf("== %s, %d threads\n", kernels->name, n_threads);
    for (const auto& [name, run] : sections)
      if (section.empty() || section == name) run(*kernels);
  }
}
