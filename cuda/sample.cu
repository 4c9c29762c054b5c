// Tokens from logits. A vocabulary is cut into parts, a warp each; what the parts know bounds the
// few candidates that matter, which one block per output then sorts and draws from.
#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/launch.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

using Key = std::uint64_t;

constexpr int max_parts = 1024, max_candidates = 1024;
constexpr int sample_threads = 1024, sample_warps = sample_threads / 32;
constexpr int part_threads = 256;
// Parts that have a candidate, where no top_k says how many are needed.
constexpr int default_parts = 256;
constexpr Key not_finite = ~Key{0};

// Sorts like (logit, lower id first), -0 as 0. Zero = no candidate.
__device__ __forceinline__ Key key_of(float logit, int id) {
  const std::uint32_t bits = __float_as_uint(logit + 0.0f);
  const std::uint32_t upper = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<Key>(upper) << 32 | ~static_cast<std::uint32_t>(id);
}
__device__ __forceinline__ float logit_of(Key key) {
  const auto upper = static_cast<std::uint32_t>(key >> 32);
  return __uint_as_float((upper & 0x80000000u) != 0 ? upper ^ 0x80000000u : ~upper);
}
__device__ __forceinline__ std::int32_t id_of(Key key) {
  return static_cast<std::int32_t>(~static_cast<std::uint32_t>(key));
}

__device__ __forceinline__ bool suppressed(const Draw& d, int id) {
  bool found = false;
  for (const std::int32_t s : d.suppressed) found |= s == id;
  return found;
}

// What a part knows.
struct Part {
  Key best;     // not_finite if one of its logits is not
  double mass;  // sum of weights relative to its best, where the draw needs it
};

struct SampleArgs {
  const float* logits;  // [rows, vocab]
  const Draw* draws;    // [rows]
  int vocab, parts, part_logits;
  Part* found;  // [rows, parts]
  std::int32_t* ids;
};

// Without a filter, tokens are drawn in order of ids among all.
__device__ __forceinline__ bool unfiltered(const Draw& d) {
  return d.top_k <= 0 && d.top_p >= 1 && d.log_min_p == -INFINITY;
}

__device__ __forceinline__ bool takes_all(const Draw& d, int vocab) {
  return d.top_k <= 0 || d.top_k >= vocab;
}

// top_p's weights are those of temperature 1; differences are rounded as the CPU rounds them.
__device__ __forceinline__ double share(float logit, float best) {
  return exp(static_cast<double>(logit - best));
}
__device__ __forceinline__ double weight(float logit, float best, float temperature) {
  return exp((static_cast<double>(logit) - best) / temperature);
}

template <class T>
__device__ __forceinline__ T warp_all(T v, T (*combine)(T, T)) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v = combine(v, __shfl_xor_sync(all_lanes, v, d));
  return v;
}
__device__ __forceinline__ Key larger(Key a, Key b) { return a > b ? a : b; }
__device__ __forceinline__ double plus(double a, double b) { return a + b; }

// A warp per part. grid (parts, rows)
__global__ void __launch_bounds__(part_threads) sample_parts_kernel(const SampleArgs a) {
  const Draw d = a.draws[blockIdx.y];
  begin();
  const int part = static_cast<int>(blockIdx.x) * (part_threads / 32) + warp_id();
  if (part >= a.parts || d.temperature == Draw::by_host) return;
  const float* row = a.logits + static_cast<std::int64_t>(blockIdx.y) * a.vocab;
  const int first = part * a.part_logits, end = min(first + a.part_logits, a.vocab);
  Key best = 0;
#pragma unroll 8
  for (int i = first + lane_id(); i < end; i += 32) {
    const float x = row[i];
    if (!isfinite(x)) {
      best = not_finite;
    } else if (!suppressed(d, i)) {
      best = larger(best, key_of(x, i));
    }
  }
  best = warp_all(best, larger);
  double mass = 0;
  if (best != 0 && best != not_finite && d.temperature > 0 && takes_all(d, a.vocab) &&
      (d.top_p < 1 || unfiltered(d))) {
    const float most = logit_of(best);
    for (int i = first + lane_id(); i < end; i += 32)
      if (!suppressed(d, i))
        mass += unfiltered(d) ? weight(row[i], most, d.temperature) : share(row[i], most);
    mass = warp_all(mass, plus);
  }
  if (lane_id() == 0)
    a.found[static_cast<std::int64_t>(blockIdx.y) * a.parts + part] = {best, mass};
}

// Inclusive sums over the block's threads, in a fixed order.
__device__ double block_scan(double v, double* warps) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const double other = __shfl_up_sync(all_lanes, v, d);
    if (lane_id() >= d) v += other;
  }
  __syncthreads();  // an earlier call may still be reading
  if (lane_id() == 31) warps[warp_id()] = v;
  __syncthreads();
  double before = 0;
  for (int w = 0; w < warp_id(); ++w) before += warps[w];
  return before + v;
}

// Every thread gets the lowest index of a thread that says yes, or sample_threads.
__device__ int first_thread(bool yes, int* found) {
  __syncthreads();
  if (threadIdx.x == 0) *found = sample_threads;
  __syncthreads();
  if (yes) atomicMin(found, static_cast<int>(threadIdx.x));
  __syncthreads();
  return *found;
}

// Descending; n a power of two.
__device__ void sort_keys(Key* keys, int n) {
  const int i = static_cast<int>(threadIdx.x);
  for (int size = 2; size <= n; size *= 2)
    for (int distance = size / 2; distance > 0; distance /= 2) {
      __syncthreads();
      const int other = i ^ distance;
      if (i < n && other > i) {
        const Key x = keys[i], y = keys[other];
        if (((i & size) == 0) == (x < y)) keys[i] = y, keys[other] = x;
      }
    }
  __syncthreads();
}

struct SampleShared {
  Key best[max_parts];  // of the parts
  Key candidates[max_candidates];
  double warps[sample_warps];
  double target;
  int count, found;
};

// The token at which the sum of all weights in order of ids exceeds the target.
__device__ void draw_from_all(const SampleArgs& a, const Draw& d, const float* row, float most,
                              const Part& mine, SampleShared& s, std::int32_t* id) {
  const int t = static_cast<int>(threadIdx.x);
  const double mass =
      mine.best != 0 ? mine.mass * weight(logit_of(mine.best), most, d.temperature) : 0;
  const double sum = block_scan(mass, s.warps);
  if (t == sample_threads - 1) s.target = d.uniform * sum;
  __syncthreads();
  const int part = first_thread(sum > s.target, &s.found);
  if (t == part) s.target -= sum - mass;
  __syncthreads();
  if (warp_id() > 0) return;
  const int first = part * a.part_logits, end = min(first + a.part_logits, a.vocab);
  double before = 0;
  std::int32_t last = -1;  // taken where the sum is rounded down to the target
  for (int at = first; at < end; at += 32) {
    const int i = at + lane_id();
    const bool in = i < end && !suppressed(d, i);
    double sums = in ? weight(row[i], most, d.temperature) : 0;
#pragma unroll
    for (int k = 1; k < 32; k <<= 1) {
      const double other = __shfl_up_sync(all_lanes, sums, k);
      if (lane_id() >= k) sums += other;
    }
    const unsigned over = __ballot_sync(all_lanes, in && before + sums > s.target);
    const unsigned those = __ballot_sync(all_lanes, in);
    if (those != 0) last = at + 31 - __clz(those);
    if (over != 0) {
      last = at + __ffs(over) - 1;
      break;
    }
    before += __shfl_sync(all_lanes, sums, 31);
  }
  if (t == 0) *id = last;
}

// A block per row, a thread per part and then per candidate.
__global__ void __launch_bounds__(sample_threads) sample_kernel(const SampleArgs a) {
  __shared__ SampleShared s;
  const Draw d = a.draws[blockIdx.x];
  const int t = static_cast<int>(threadIdx.x);
  begin();
  const float* row = a.logits + static_cast<std::int64_t>(blockIdx.x) * a.vocab;
  std::int32_t* id = a.ids + blockIdx.x;
  if (t == 0) *id = -1;
  if (d.temperature == Draw::by_host) return;

  const Part mine =
      t < a.parts ? a.found[static_cast<std::int64_t>(blockIdx.x) * a.parts + t] : Part{0, 0};
  s.best[t] = mine.best;
  if (t == 0) s.count = 0;
  __syncthreads();
  Key best = 0;
  for (int w = lane_id(); w < max_parts; w += 32) best = larger(best, s.best[w]);
  best = warp_all(best, larger);
  if (best == 0 || best == not_finite) return;
  const float most = logit_of(best);
  if (d.temperature == 0) {
    if (t == 0) *id = id_of(best);
    return;
  }
  if (unfiltered(d)) return draw_from_all(a, d, row, most, mine, s, id);

  const bool all = takes_all(d, a.vocab), single = a.part_logits == 1;
  // Whether no token behind the candidates could be kept.
  const bool complete = single || (!all && d.top_k <= a.parts);
  if (!all && !complete && d.top_p < 1) return;  // a share of more tokens than are candidates
  // The k-th best of the parts' best is a bound that the k best tokens reach, and not many others.
  const int needed = !complete ? default_parts : all ? a.parts : min(d.top_k, a.parts);
  s.candidates[t] = mine.best;
  sort_keys(s.candidates, max_parts);
  const Key bound = s.candidates[min(needed, a.parts) - 1];
  __syncthreads();
  for (int p = warp_id(); p < a.parts; p += sample_warps) {
    if (s.best[p] < bound || s.best[p] == 0) continue;
    const int end = min((p + 1) * a.part_logits, a.vocab);
#pragma unroll 4
    for (int i = p * a.part_logits + lane_id(); i < end; i += 32) {
      const Key key = key_of(row[i], i);
      if (key < bound || suppressed(d, i)) continue;
      const int at = atomicAdd(&s.count, 1);  // sorted below, so the order does not matter
      if (at < max_candidates) s.candidates[at] = key;
    }
  }
  __syncthreads();
  const int count = s.count;
  if (count > max_candidates) return;
  int padded = 2;
  while (padded < count) padded *= 2;
  if (t >= count && t < padded) s.candidates[t] = 0;
  sort_keys(s.candidates, padded);

  const int k = all ? count : min(d.top_k, count);
  const float logit = t < k ? logit_of(s.candidates[t]) : most;
  int kept = k;
  bool cut = complete;
  if (d.top_p < 1) {
    const double sum = block_scan(t < k ? share(logit, most) : 0, s.warps);
    const double mass = mine.best != 0 ? mine.mass * share(logit_of(mine.best), most) : 0;
    const double total = all ? block_scan(mass, s.warps) : sum;
    if (t == (all ? sample_threads : k) - 1) s.target = total;
    __syncthreads();
    const int last = first_thread(t < k && sum >= d.top_p * s.target, &s.found);
    if (last < k) kept = last + 1, cut = true;
  }
  const int small = first_thread(t < k && logit < most + d.log_min_p, &s.found);
  if (small < k) kept = min(kept, small), cut = true;
  if (!cut) return;
  const double sum = block_scan(t < kept ? weight(logit, most, d.temperature) : 0, s.warps);
  __syncthreads();
  if (t == kept - 1) s.target = d.uniform * sum;
  __syncthreads();
  const int chosen = first_thread(t < kept && sum > s.target, &s.found);
  if (t == 0) *id = id_of(s.candidates[chosen < kept ? chosen : 0]);
}

int logits_of_part(std::int64_t vocab) { return static_cast<int>(div_up(vocab, max_parts)); }

std::int64_t parts_of(std::int64_t vocab) { return div_up(vocab, logits_of_part(vocab)); }

}  // namespace

std::size_t scratch_bytes(const Sample&, std::int64_t rows, std::int64_t vocab) {
  return static_cast<std::size_t>(rows * parts_of(vocab)) * sizeof(Part);
}

void run(const Sample& op, const Context& c) {
  const std::int64_t rows = c.rows(op.logits), vocab = c.cols(op.logits);
  if (rows == 0) return;
  const auto parts = static_cast<int>(parts_of(vocab));
  const SampleArgs a{c.f32(op.logits),
                     c.step.draws,
                     static_cast<int>(vocab),
                     parts,
                     logits_of_part(vocab),
                     reinterpret_cast<Part*>(c.scratch),
                     c.i32(op.ids)};
  const dim3 grid(static_cast<unsigned>(div_up(parts, part_threads / 32)),
                  static_cast<unsigned>(rows));
  launch(sample_parts_kernel, grid, part_threads, 0, c.stream, a);
  launch(sample_kernel, static_cast<unsigned>(rows), sample_threads, 0, c.stream, a);
}

}  // namespace imp::cuda
