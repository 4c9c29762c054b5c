// Log-softmax at one token per row.
#include "cpp/runtime/score.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpp/core/error.h"
#include "cpp/core/sysinfo.h"
#include "cpp/core/threads.h"

namespace imp {
namespace {

// NaN if any logit is not finite.
double nll_of(std::span<const float> row, std::int32_t target) {
  float top = -std::numeric_limits<float>::infinity();
  bool finite = true;
  for (const float x : row) {
    finite = finite && std::isfinite(x);
    top = std::max(top, x);
  }
  if (!finite) return std::numeric_limits<double>::quiet_NaN();
  double sum = 0;
  for (const float x : row) sum += std::exp(x - top);
  return std::log(sum) - static_cast<double>(row[static_cast<std::size_t>(target)] - top);
}

}  // namespace

void token_nll(std::span<const float> logits, std::int64_t vocab,
               std::span<const std::int32_t> targets, double* nll, int threads) {
  for (const std::int32_t t : targets)
    if (t < 0 || t >= vocab)
      fail(ErrorCode::invalid_argument, str("target ", t, " in a vocabulary of ", vocab));
  constexpr std::int64_t worth_a_thread = 1 << 18;  // logits
  const std::int64_t most = static_cast<std::int64_t>(logits.size()) / worth_a_thread + 1;
  ThreadPool pool(
      static_cast<int>(std::min<std::int64_t>(threads == 0 ? usable_processors() : threads, most)));
  const auto width = static_cast<std::size_t>(vocab);
  pool.parallel_for(std::ssize(targets), [&](std::int64_t i, int) {
    nll[i] = nll_of(logits.subspan(static_cast<std::size_t>(i) * width, width),
                    targets[static_cast<std::size_t>(i)]);
  });
  for (std::size_t i = 0; i < targets.size(); ++i)
    if (std::isnan(nll[i])) fail(ErrorCode::numeric, str("logits of row ", i, " are not finite"));
}

}  // namespace imp
