// Log-softmax at one token per row.
#include "cpp/runtime/score.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpp/core/error.h"
#include "cpp/core/sysinfo.h"
#include "cpp/core/threads.h"
#include "cpp/cpu/choose.h"

namespace imp {
namespace {

// NaN if any logit is not finite: the sum of squares shows it cheaply.
double nll_of(const cpu::Kernels& k, std::span<const float> row, std::int32_t target) {
  const auto n = std::ssize(row);
  const float top = k.max(row.data(), n);
  const float square_sum = k.dot(row.data(), row.data(), n);
  if (!std::isfinite(top) || !std::isfinite(square_sum)) {
    for (const float x : row)
      if (!std::isfinite(x)) return std::numeric_limits<double>::quiet_NaN();
  }
  return std::log(k.sum_exp(row.data(), n, top)) -
         static_cast<double>(row[static_cast<std::size_t>(target)] - top);
}

}  // namespace

void token_nll(std::span<const float> logits, std::int64_t vocab,
               std::span<const std::int32_t> targets, double* nll, int threads) {
  for (const std::int32_t t : targets)
    if (t < 0 || t >= vocab)
      fail(ErrorCode::invalid_argument, str("target ", t, " in a vocabulary of ", vocab));
  constexpr std::int64_t worth_a_thread = 1 << 18;  // logits
  const std::int64_t most = static_cast<std::int64_t>(logits.size()) / worth_a_thread + 1;
  ThreadPool pool(static_cast<int>(std::min<std::int64_t>(
      threads == 0 ? std::min(usable_processors(), max_threads) : threads, most)));
  const cpu::Kernels& kernels = cpu::choose_kernels("auto");
  const auto width = static_cast<std::size_t>(vocab);
  pool.parallel_for(std::ssize(targets), [&](std::int64_t i, int) {
    nll[i] = nll_of(kernels, logits.subspan(static_cast<std::size_t>(i) * width, width),
                    targets[static_cast<std::size_t>(i)]);
  });
  for (std::size_t i = 0; i < targets.size(); ++i)
    if (std::isnan(nll[i])) fail(ErrorCode::numeric, str("logits of row ", i, " are not finite"));
}

}  // namespace imp
