// One block resolves a layer; the whole device gathers.
#include <vector>

#include "cpp/core/error.h"
#include "cpp/memory/expert_cache.h"
#include "cuda/check.h"
#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/route.cuh"
#include "cuda/expert_cache.h"
#include "cuda/launch.h"
#include "cuda/watchdog.h"

namespace imp::cuda {
namespace {

constexpr int resolve_threads = 512;
constexpr int resolve_warps = resolve_threads / 32;

// Victims come in the order of (score, slot). Both fit one word: scores grow by at most score_unit
// a step, and a process does not live for 2^37 steps.
constexpr int slot_bits = 20;
__device__ __forceinline__ std::uint64_t victim_key(std::uint64_t score, std::int32_t slot) {
  return score << slot_bits | static_cast<std::uint32_t>(slot);
}
constexpr std::uint64_t no_victim = ~std::uint64_t{0};

struct Resolve {
  ExpertCacheView c;
  std::int32_t layer;
  const std::int32_t* ids;
  std::int32_t n, low, high;
  bool first;
  bool early;       // no kernel that may still run changes what read_tables() reads
  RouteArgs route;  // with logits: of the one token, whose ids this writes
};

// Number of `mine` in the threads before this one; `total` of all. Every thread calls it.
__device__ int block_rank(bool mine, int* warps, int& total) {
  const unsigned ballot = __ballot_sync(all_lanes, mine);
  __syncthreads();
  if (lane_id() == 0) warps[warp_id()] = __popc(ballot);
  __syncthreads();
  int before = 0;
  total = 0;
  for (int w = 0; w < resolve_warps; ++w) {
    if (w < warp_id()) before += warps[w];
    total += warps[w];
  }
  return before + __popc(ballot & ((1u << lane_id()) - 1));
}

struct Shared {
  std::uint64_t slot_score[max_cached_experts];  // of the layer's own slots, as the step finds them
  std::int32_t slot_pair[max_cached_experts];
  alignas(4) std::uint8_t add[sizeof(ScoreTable)];
  std::uint64_t keys[max_cached_experts];  // of the layer's slots, or of the chosen victims
  std::uint64_t miss_score[max_cached_experts];
  std::int32_t miss[max_cached_experts], victim[max_cached_experts];
  std::uint8_t routed[max_cached_experts];
  std::uint32_t histogram[256];
  std::uint64_t least, most, prefix;
  std::int32_t left, found;
  int warps[resolve_warps];
  Candidates candidates;
};

// What a slot holds: a pair or -1, and its score.
struct Held {
  std::int32_t pair;
  std::uint64_t score;
};

__device__ __forceinline__ Held held(const ExpertCacheView& c, std::int32_t slot) {
  const std::int32_t pair = c.pair_of[slot];
  return {pair, pair < 0 ? 0 : c.score[pair]};
}

// A thread's experts of the layer, before this step uses them.
constexpr int thread_experts = max_cached_experts / resolve_threads;
struct Known {
  std::uint64_t score[thread_experts];
  std::int32_t slot[thread_experts];
};

__device__ __forceinline__ void read_tables(const Resolve& r, Shared& s, Known& known) {
  const ExpertCacheView& c = r.c;
#pragma unroll
  for (int i = 0; i < thread_experts; ++i) {
    const int e = i * resolve_threads + static_cast<int>(threadIdx.x);
    if (e >= c.experts) continue;
    const std::int64_t pair = static_cast<std::int64_t>(r.layer) * c.experts + e;
    known.score[i] = c.score[pair];
    known.slot[i] = c.slot_of[pair];
  }
  if (!c.policy.per_layer) return;
  const std::int32_t first = first_slot_of(r.layer, c.layers, c.slots),
                     slots = first_slot_of(r.layer + 1, c.layers, c.slots) - first;
  for (int i = threadIdx.x; i < slots; i += resolve_threads) {
    const Held h = held(c, first + i);
    s.slot_pair[i] = h.pair;
    s.slot_score[i] = h.score;
  }
}

__device__ std::uint64_t key_of(const Resolve& r, const Shared& s, const Held& h,
                                std::int32_t slot) {
  if (h.pair < 0) return victim_key(0, slot);
  const std::int32_t layer = h.pair / r.c.experts;
  if (layer == r.layer && s.routed[h.pair - layer * r.c.experts] != 0) return no_victim;
  return victim_key(h.score, slot);
}

// s.victim[i] = the slot with the i-th lowest key, i < n: each key's rank is the number below it.
__device__ void layer_victims(const Resolve& r, Shared& s, int n, std::int32_t first,
                              std::int32_t last) {
  const int slots = last - first;
  for (int i = threadIdx.x; i < slots; i += resolve_threads)
    s.keys[i] = key_of(r, s, {s.slot_pair[i], s.slot_score[i]}, first + i);
  __syncthreads();
  for (int i = threadIdx.x; i < slots; i += resolve_threads) {
    const std::uint64_t key = s.keys[i];
    int rank = 0;
    for (int j = 0; j < slots; ++j) rank += s.keys[j] < key;
    if (rank < n) s.victim[rank] = first + i;
  }
  __syncthreads();
}

// The same over the slots of all layers: the n-th lowest key is found digit by digit, then the n
// keys up to it are ranked.
__device__ void pool_victims(const Resolve& r, Shared& s, int n) {
  if (threadIdx.x == 0) s.least = no_victim, s.most = 0, s.prefix = 0, s.left = n, s.found = 0;
  __syncthreads();
  std::uint64_t least = no_victim, most = 0;
  for (std::int32_t i = threadIdx.x; i < r.c.slots; i += resolve_threads) {
    const std::uint64_t key = key_of(r, s, held(r.c, i), i);
    if (key == no_victim) continue;
    least = min(least, key);
    most = max(most, key);
  }
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) {
    least = min(least, __shfl_xor_sync(all_lanes, least, d));
    most = max(most, __shfl_xor_sync(all_lanes, most, d));
  }
  if (lane_id() == 0) {
    atomicMin(reinterpret_cast<unsigned long long*>(&s.least), least);
    atomicMax(reinterpret_cast<unsigned long long*>(&s.most), most);
  }
  __syncthreads();
  // Keys agree above the highest bit in which the least and the most differ.
  const int bits = 64 - __clzll(static_cast<long long>(s.least ^ s.most));
  int shift = (bits + 7) / 8 * 8;
  const std::uint64_t common = shift >= 64 ? 0 : s.most >> shift;
  std::uint64_t prefix = common;
  while (shift > 0) {
    shift -= 8;
    for (int i = threadIdx.x; i < 256; i += resolve_threads) s.histogram[i] = 0;
    __syncthreads();
    for (std::int32_t i = threadIdx.x; i < r.c.slots; i += resolve_threads) {
      const std::uint64_t key = key_of(r, s, held(r.c, i), i);
      const std::uint64_t above = shift + 8 >= 64 ? 0 : key >> (shift + 8);
      if (key != no_victim && above == prefix) atomicAdd(&s.histogram[key >> shift & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = 0, left = s.left;
      while (static_cast<int>(s.histogram[digit]) < left) left -= s.histogram[digit++];
      s.left = left;
      s.prefix = prefix << 8 | static_cast<unsigned>(digit);
    }
    __syncthreads();
    prefix = s.prefix;
  }
  for (std::int32_t i = threadIdx.x; i < r.c.slots; i += resolve_threads) {
    const std::uint64_t key = key_of(r, s, held(r.c, i), i);
    if (key <= prefix) s.keys[atomicAdd(&s.found, 1)] = key;  // any order: they are ranked next
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += resolve_threads) {
    const std::uint64_t key = s.keys[i];
    int rank = 0;
    for (int j = 0; j < n; ++j) rank += s.keys[j] < key;
    s.victim[rank] = static_cast<std::int32_t>(key & ((1u << slot_bits) - 1));
  }
  __syncthreads();
}

__global__ void __launch_bounds__(resolve_threads)
    resolve_kernel(const __grid_constant__ Resolve r) {
  __shared__ Shared s;
  const ExpertCacheView& c = r.c;
  Known known;
  if (r.early) read_tables(r, s, known);
  if (threadIdx.x < sizeof(ScoreTable) / 4)
    reinterpret_cast<std::uint32_t*>(s.add)[threadIdx.x] =
        reinterpret_cast<const std::uint32_t*>(c.add)[threadIdx.x];
  for (int e = threadIdx.x; e < c.experts; e += resolve_threads) s.routed[e] = 0;
  begin();
  if (r.route.logits != nullptr && warp_id() == 0)
    choose_experts(r.route, r.route.logits, s.candidates, r.route.ids, r.route.weights,
                   r.route.planted);
  if (!r.early) read_tables(r, s, known);
  const std::uint64_t step = *c.step + (r.first ? 1 : 0);
  __syncthreads();
  if (threadIdx.x == 0) *c.step = step;
  for (int i = threadIdx.x; i < r.n; i += resolve_threads) {
    const std::int32_t e = r.ids[i];
    if (e >= r.low && e < r.high) s.routed[e] = 1;
  }
  __syncthreads();

  const std::int64_t row = static_cast<std::int64_t>(r.layer) * c.experts;
  int n = 0, wanted = 0;
#pragma unroll
  for (int i = 0; i < thread_experts; ++i) {
    if (i * resolve_threads >= c.experts) break;
    const int e = i * resolve_threads + static_cast<int>(threadIdx.x);
    const bool routed = e < c.experts && s.routed[e] != 0;
    std::int32_t slot = -1;
    std::uint64_t score = 0;
    if (routed) {
      score = used_score(c.policy, s.add, known.score[i], step);
      c.score[row + e] = score;
      slot = known.slot[i];
      if (slot >= 0) c.places[row + e] = {slot, -1};
    }
    int total;
    const int at = block_rank(routed && slot < 0, s.warps, total);
    if (routed && slot < 0) {
      s.miss[n + at] = e;
      s.miss_score[n + at] = score;
    }
    n += total;
    wanted += __syncthreads_count(routed);
  }
  __syncthreads();
  const std::int32_t own = first_slot_of(r.layer, c.layers, c.slots);
  if (n > 0) {
    if (c.policy.per_layer)
      layer_victims(r, s, n, own, first_slot_of(r.layer + 1, c.layers, c.slots));
    else
      pool_victims(r, s, n);
  }

  // The best misses meet the worst slots; once one is refused, all after it are.
  int kept = 0;
  for (int base = 0; base < n; base += resolve_threads) {
    const int i = base + static_cast<int>(threadIdx.x);
    int rank = i;
    bool enters = false;
    std::int32_t e = 0, slot = 0;
    if (i < n) {
      e = s.miss[i];
      const std::uint64_t score = s.miss_score[i];
      if (c.policy.admission) {
        rank = 0;
        for (int j = 0; j < n; ++j)
          rank += s.miss_score[j] > score || (s.miss_score[j] == score && j < i);
      }
      slot = s.victim[rank];
      const Held old = c.policy.per_layer ? Held{s.slot_pair[slot - own], s.slot_score[slot - own]}
                                          : held(c, slot);
      enters = !c.policy.admission || old.pair < 0 || score > old.score;
      if (enters) {
        if (old.pair >= 0) c.slot_of[old.pair] = -1;
        c.pair_of[slot] = static_cast<std::int32_t>(row) + e;
        c.slot_of[row + e] = slot;
      }
    }
    int total;
    block_rank(enters, s.warps, total);
    kept += total;
    if (i < n) {  // for the second pass, when the number of those that enter is known
      s.keys[i] =
          static_cast<std::uint64_t>(rank) << 32 | (enters ? static_cast<unsigned>(slot) : ~0u);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += resolve_threads) {
    const int rank = static_cast<int>(s.keys[i] >> 32);
    const auto slot = static_cast<std::int32_t>(s.keys[i]);
    const std::int32_t to = slot >= 0 ? slot : c.slots + rank - kept;
    c.places[row + s.miss[i]] = {to, rank};
    c.misses[rank] = {s.miss[i], to};
    c.arrived[2 * rank] = c.arrived[2 * rank + 1] = 0;
  }
  if (threadIdx.x == 0) {
    *c.n_misses = n;
    ExpertCacheView::Counts& counts = c.counts[r.layer];
    counts.wanted += wanted;
    counts.hits += wanted - n;
    counts.kept += kept;
  }
}

__device__ __forceinline__ std::uint64_t now_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ uint4 load_host(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// The slots of this step's misses become 0xff: scales of NaN.
__global__ void poison_kernel(const __grid_constant__ ExpertCacheView c) {
  begin();
  const std::int64_t words = c.blob_bytes / static_cast<std::int64_t>(sizeof(uint4)),
                     step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (int m = 0; m < *c.n_misses; ++m) {
    auto* slot = reinterpret_cast<uint4*>(c.slab + c.misses[m].slot * c.blob_bytes);
    for (std::int64_t i = global_thread(); i < words; i += step) slot[i] = {~0u, ~0u, ~0u, ~0u};
  }
}

// Enough in flight to fill the bus, in few blocks that fit beside those of other kernels.
constexpr int gather_blocks = 32, gather_threads = 256;
constexpr int gather_loads = 8;  // of 16 bytes, of a thread
constexpr int piece_words = gather_threads * gather_loads, piece_bytes = 16 * piece_words;

__global__ void __launch_bounds__(gather_threads)
    gather_kernel(const __grid_constant__ ExpertCacheView c, int layer, int first_pieces,
                  int more_pieces) {
  await_previous();
  const int n = *c.n_misses;
  if (n == 0) return;
  if (c.overlap) allow_next();
  const bool timed = blockIdx.x == 0 && threadIdx.x == 0;
  const std::uint64_t begin_ns = timed ? now_ns() : 0;
  const int first_end = n * first_pieces;
  for (int p = blockIdx.x; p < first_end + n * more_pieces; p += gridDim.x) {
    const bool later = p >= first_end;
    const int pieces = later ? more_pieces : first_pieces, q = later ? p - first_end : p;
    const int m = q / pieces;
    const ExpertCacheView::Miss miss = c.misses[m];
    const std::int64_t begin = later ? c.first_bytes : 0;
    const auto words = static_cast<int>(((later ? c.blob_bytes : c.first_bytes) - begin) /
                                        static_cast<int>(sizeof(uint4)));
    const int first = q % pieces * piece_words + static_cast<int>(threadIdx.x);
    const auto* from = reinterpret_cast<const uint4*>(
        c.store[layer] + static_cast<std::int64_t>(miss.expert) * c.blob_bytes + begin);
    auto* to = reinterpret_cast<uint4*>(
        c.slab + static_cast<std::int64_t>(miss.slot) * c.blob_bytes + begin);
    uint4 v[gather_loads];
#pragma unroll
    for (int i = 0; i < gather_loads; ++i)
      if (first + i * gather_threads < words) v[i] = load_host(from + first + i * gather_threads);
#pragma unroll
    for (int i = 0; i < gather_loads; ++i)
      if (first + i * gather_threads < words) to[first + i * gather_threads] = v[i];
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(&c.arrived[2 * m + (later ? 1 : 0)], 1u);
    }
  }
  if (timed) c.counts[layer].fetch_ns += now_ns() - begin_ns;
}

}  // namespace

std::uint32_t gather_pieces(std::int64_t bytes) {
  return static_cast<std::uint32_t>(div_up(bytes, piece_bytes));
}

ExpertCacheMemory::ExpertCacheMemory(const Shape& shape, const ExpertPolicy& policy,
                                     const std::vector<const std::byte*>& store,
                                     cudaStream_t stream) {
  // The host reference checks the numbers, and its limits are these.
  const ExpertCache reference({shape.layers, shape.experts, shape.slots}, policy);
  if (shape.experts > max_cached_experts)
    fail(ErrorCode::unsupported,
         str("a cache for ", shape.experts, " experts a layer, imp takes ", max_cached_experts));
  if (shape.slots >= std::int64_t{1} << slot_bits)
    fail(ErrorCode::invalid_argument,
         str(shape.slots, " expert slots, imp takes ", (std::int64_t{1} << slot_bits) - 1));
  if (std::ssize(store) != shape.layers || shape.blob_bytes % blob_alignment != 0 ||
      shape.first_bytes % blob_alignment != 0 || shape.first_bytes > shape.blob_bytes)
    fail(ErrorCode::internal, "an expert store that does not fit its cache");
  const auto layers = static_cast<std::size_t>(shape.layers),
             pairs = layers * static_cast<std::size_t>(shape.experts),
             slots = static_cast<std::size_t>(shape.slots);
  slab_ = device_memory((slots + static_cast<std::size_t>(shape.staging)) * shape.blob_bytes,
                        "the expert cache");
  std::size_t end = 0;
  const auto take = [&end](std::size_t bytes) {
    constexpr std::size_t alignment = 256;
    const std::size_t at = end;
    end += (bytes + alignment - 1) / alignment * alignment;
    return at;
  };
  const std::size_t slot_of = take(4 * pairs), pair_of = take(4 * slots), minus_ones = end,
                    score = take(8 * pairs), places = take(sizeof(ExpertPlace) * pairs),
                    misses = take(sizeof(ExpertCacheView::Miss) * max_cached_experts),
                    n_misses = take(4), arrived = take(8 * max_cached_experts), step = take(8),
                    counts = take(sizeof(ExpertCacheView::Counts) * layers),
                    add = take(sizeof(ScoreTable)), bases = take(sizeof(void*) * layers);
  tables_ = device_memory(end, "the expert cache's tables");
  std::byte* t = tables_.data();
  check(cudaMemsetAsync(t, 0, end, stream), "cudaMemsetAsync");
  check(cudaMemsetAsync(t, 0xff, minus_ones, stream), "cudaMemsetAsync");
  check(cudaMemcpyAsync(t + add, score_table().add.data(), sizeof(ScoreTable),
                        cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
  check(cudaMemcpyAsync(t + bases, store.data(), sizeof(void*) * layers, cudaMemcpyHostToDevice,
                        stream),
        "cudaMemcpyAsync");
  finish(stream, "clearing the expert cache");
  view_ = {policy,
           static_cast<std::int32_t>(shape.layers),
           static_cast<std::int32_t>(shape.experts),
           static_cast<std::int32_t>(shape.slots),
           static_cast<std::int32_t>(shape.staging),
           static_cast<std::int64_t>(shape.blob_bytes),
           static_cast<std::int64_t>(shape.first_bytes),
           shape.overlap,
           shape.poison,
           slab_.data(),
           reinterpret_cast<const std::byte* const*>(t + bases),
           reinterpret_cast<std::int32_t*>(t + slot_of),
           reinterpret_cast<std::int32_t*>(t + pair_of),
           reinterpret_cast<std::uint64_t*>(t + score),
           reinterpret_cast<ExpertPlace*>(t + places),
           reinterpret_cast<const std::uint8_t*>(t + add),
           reinterpret_cast<ExpertCacheView::Miss*>(t + misses),
           reinterpret_cast<std::int32_t*>(t + n_misses),
           reinterpret_cast<std::uint32_t*>(t + arrived),
           reinterpret_cast<std::uint64_t*>(t + step),
           reinterpret_cast<ExpertCacheView::Counts*>(t + counts)};
}

void resolve_experts(const ExpertCacheView& view, std::int32_t layer, const std::int32_t* ids,
                     std::int64_t n, std::int32_t low, std::int32_t high, bool first,
                     const RouteArgs& route, cudaStream_t stream) {
  // A layer's own tables change in its own calls alone: the last was a step ago, unless a step has
  // several.
  const bool early = view.policy.per_layer && low == 0 && high == view.experts;
  launch(resolve_kernel, 1, resolve_threads, 0, stream,
         Resolve{view, layer, ids, static_cast<std::int32_t>(n), low, high, first, early, route});
}

void gather_experts(const ExpertCacheView& view, std::int32_t layer, cudaStream_t stream) {
  if (view.poison) launch(poison_kernel, gather_blocks, gather_threads, 0, stream, view);
  launch(gather_kernel, gather_blocks, gather_threads, 0, stream, view, layer,
         gather_pieces(view.first_bytes), gather_pieces(view.blob_bytes - view.first_bytes));
}

}  // namespace imp::cuda
