// The cache of experts on the device: every victim against the host reference, then the speed of
// its kernels. Exit status 1 at the first difference.
//
//     imp_bench_experts [steps]     (default 100000 a policy)
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpp/core/error.h"
#include "cpp/memory/expert_cache.h"
#include "cuda/check.h"
#include "cuda/expert_cache.h"
#include "cuda/expert_store.h"

namespace {

using namespace imp;
using namespace imp::cuda;

using Ids = std::vector<std::int32_t>;

template <class T>
std::vector<T> download(const T* p, std::size_t n, cudaStream_t stream) {
  std::vector<T> v(n);
  check(cudaMemcpyAsync(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost, stream), "download");
  check(cudaStreamSynchronize(stream), "download");
  return v;
}

template <class T>
void upload(T* to, const std::vector<T>& v, cudaStream_t stream) {
  check(cudaMemcpyAsync(to, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice, stream),
        "upload");
  check(cudaStreamSynchronize(stream), "upload");
}

// Rows of k distinct experts, some much more often than others.
Ids draw(std::mt19937& random, int rows, int k, int experts) {
  Ids ids;
  for (int r = 0; r < rows; ++r) {
    const std::size_t begin = ids.size();
    while (ids.size() < begin + static_cast<std::size_t>(k)) {
      const double u = std::uniform_real_distribution<double>(0, 1)(random);
      const auto e = static_cast<std::int32_t>(experts * u * u);
      if (std::find(ids.begin() + static_cast<std::ptrdiff_t>(begin), ids.end(), e) == ids.end())
        ids.push_back(e);
    }
  }
  return ids;
}

// Steps go to the device by groups: all ids of a group, then a resolve and a copy of what it found
// for each.
bool same(const char* policy, std::int64_t steps, cudaStream_t stream) {
  constexpr int layers = 3, experts = 520, k = 10, most_rows = 4, most = k * most_rows;
  constexpr int group = 300;  // a multiple of the layers
  constexpr std::int64_t slots = 3 * 70 + 1;
  ExpertCache host({layers, experts, slots}, read_policy(policy));
  const std::vector<const std::byte*> nowhere(layers, nullptr);
  const ExpertCacheMemory memory({layers, experts, slots, most, blob_alignment, 0},
                                 read_policy(policy), nowhere, stream);
  const ExpertCacheView& c = memory.view();
  struct Found {
    ExpertCacheView::Miss misses[most];
    std::int32_t n;
  };
  const DeviceMemory ids_memory = device_memory(group * most * 4, "ids"),
                     found_memory = device_memory(group * sizeof(Found), "misses");
  auto* d_ids = reinterpret_cast<std::int32_t*>(ids_memory.data());
  auto* d_found = reinterpret_cast<Found*>(found_memory.data());
  std::mt19937 random(11);
  for (std::int64_t begin = 0; begin < steps; begin += group) {
    std::vector<Ids> drawn;
    Ids all;
    for (int i = 0; i < group; ++i) {
      drawn.push_back(draw(random, 1 + static_cast<int>(random() % most_rows), k, experts));
      all.insert(all.end(), drawn.back().begin(), drawn.back().end());
    }
    upload(d_ids, all, stream);
    const std::int32_t* ids = d_ids;
    for (int i = 0; i < group; ++i) {
      const int layer = i % layers;
      const auto n = std::ssize(drawn[static_cast<std::size_t>(i)]);
      resolve_experts(c, layer, ids, n, 0, experts, layer == 0, {}, stream);
      check(cudaMemcpyAsync(d_found[i].misses, c.misses, sizeof(Found::misses),
                            cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpyAsync");
      check(cudaMemcpyAsync(&d_found[i].n, c.n_misses, 4, cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpyAsync");
      ids += n;
    }
    auto found = download(d_found, group, stream);
    for (int i = 0; i < group; ++i) {
      const auto step = static_cast<std::uint64_t>((begin + i) / layers + 1);
      const ExpertCache::Resolved& r =
          host.resolve(i % layers, drawn[static_cast<std::size_t>(i)], step);
      Found& f = found[static_cast<std::size_t>(i)];
      const std::size_t n = r.misses.size();
      bool equal = f.n == static_cast<std::int32_t>(n);
      if (equal)
        std::sort(f.misses, f.misses + n, [](auto a, auto b) { return a.expert < b.expert; });
      for (std::size_t m = 0; equal && m < n; ++m) {
        const std::int32_t slot = r.misses[m].slot;
        equal = f.misses[m].expert == r.misses[m].expert &&
                (slot < 0 ? f.misses[m].slot >= slots : f.misses[m].slot == slot);
      }
      if (!equal) {
        std::printf("%s: step %ld of layer %d differs from the reference\n", policy, long(step),
                    i % layers);
        return false;
      }
    }
  }
  const auto slot_of = download(c.slot_of, layers * experts, stream),
             pair_of = download(c.pair_of, slots, stream);
  const auto score = download(c.score, layers * experts, stream);
  const auto counts = download(c.counts, layers, stream);
  bool equal = true;
  std::uint64_t hits = 0, wanted = 0;
  for (int l = 0; l < layers; ++l) {
    hits += counts[l].hits, wanted += counts[l].wanted;
    for (int e = 0; e < experts; ++e) {
      const auto i = static_cast<std::size_t>(l * experts + e);
      equal = equal && slot_of[i] == host.slot_of(l, e) && score[i] == host.score(l, e);
    }
  }
  for (std::int64_t s = 0; s < slots; ++s)
    equal = equal && pair_of[static_cast<std::size_t>(s)] == host.pair_of(s);
  equal = equal && hits == static_cast<std::uint64_t>(host.hits()) &&
          wanted == static_cast<std::uint64_t>(host.wanted());
  std::printf("victims, %-14s: %ld steps, hit rate %.3f, %s\n", policy,
              long((steps + group - 1) / group * group), double(hits) / double(wanted),
              equal ? "equal to the reference" : "TABLES DIFFER");
  return equal;
}

// Slots that held 0xff: what was missing is there whole and counted, nothing else changed.
bool gathers(std::int64_t blob, std::int64_t first, cudaStream_t stream) {
  constexpr int experts = 520, slots = 48;
  const auto size = static_cast<std::size_t>(experts * blob);
  const PinnedSlab slab(size, 0, size);
  std::mt19937 random(5);
  for (std::int64_t i = 0; i < experts * blob / 4; ++i)
    reinterpret_cast<std::uint32_t*>(slab.data())[i] = static_cast<std::uint32_t>(random());
  const ExpertCacheMemory memory(
      {1, experts, slots, 0, static_cast<std::size_t>(blob), static_cast<std::size_t>(first)},
      read_policy("lru"), {slab.data()}, stream);
  const ExpertCacheView& c = memory.view();
  check(cudaMemsetAsync(c.slab, 0xff, static_cast<std::size_t>(slots * blob), stream), "memset");
  const Ids ids{0, 7, 255, 256, 257, 511, 512, experts - 1, 7};
  const std::size_t n = ids.size() - 1;  // distinct
  const DeviceMemory d_ids = device_memory(ids.size() * 4, "ids");
  upload(reinterpret_cast<std::int32_t*>(d_ids.data()), ids, stream);
  resolve_experts(c, 0, reinterpret_cast<std::int32_t*>(d_ids.data()), std::ssize(ids), 0, experts,
                  true, {}, stream);
  gather_experts(c, 0, stream);
  const auto places = download(c.places, experts, stream);
  const auto arrived = download(c.arrived, 2 * n, stream);
  const auto bytes = download(c.slab, static_cast<std::size_t>(slots * blob), stream);
  bool equal = true;
  std::vector<bool> filled(slots);
  for (std::size_t i = 0; i < n; ++i) {
    const ExpertPlace p = places[static_cast<std::size_t>(ids[i])];
    equal = equal && p.miss >= 0 &&
            std::memcmp(&bytes[static_cast<std::size_t>(p.slot * blob)],
                        slab.data() + ids[i] * blob, static_cast<std::size_t>(blob)) == 0;
    equal = equal && arrived[2 * i] == gather_pieces(first) &&
            arrived[2 * i + 1] == gather_pieces(blob - first);
    filled[static_cast<std::size_t>(p.slot)] = true;
  }
  for (std::int64_t i = 0; i < slots * blob; ++i)
    equal = equal && (filled[static_cast<std::size_t>(i / blob)] ||
                      bytes[static_cast<std::size_t>(i)] == std::byte{0xff});
  std::printf("gathered blobs of %ld bytes, %ld first: %s\n", long(blob), long(first),
              equal ? "right" : "WRONG");
  return equal;
}

double microseconds(cudaStream_t stream, int times, const std::function<void()>& f) {
  const Event begin = [] {
    cudaEvent_t e;
    check(cudaEventCreate(&e), "cudaEventCreate");
    return Event(e);
  }();
  cudaEvent_t end;
  check(cudaEventCreate(&end), "cudaEventCreate");
  const Event owner(end);
  f();
  std::vector<float> all;
  for (int round = 0; round < 5; ++round) {
    check(cudaEventRecord(begin.get(), stream), "cudaEventRecord");
    for (int i = 0; i < times; ++i) f();
    check(cudaEventRecord(end, stream), "cudaEventRecord");
    check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin.get(), end), "cudaEventElapsedTime");
    all.push_back(ms);
  }
  std::ranges::sort(all);
  return 1e3 * all[2] / times;
}

void time_resolve(const char* policy, int slots_each, cudaStream_t stream) {
  constexpr int layers = 48, experts = 512, k = 10;
  const std::vector<const std::byte*> nowhere(layers, nullptr);
  const ExpertCacheMemory memory({layers, experts, std::int64_t{layers} * slots_each, k, 128, 0},
                                 read_policy(policy), nowhere, stream);
  for (const int misses : {0, 1, 5, 10}) {
    // The first experts stay; the others come round after more steps than there are slots.
    constexpr int cycle = 600;
    std::vector<std::int32_t> all;
    for (int i = 0; i < cycle; ++i)
      for (int j = 0; j < k; ++j)
        all.push_back(j < k - misses ? j : 10 + (i * misses + j) % (experts - 10));
    const DeviceMemory ids = device_memory(all.size() * 4, "ids");
    auto* d_ids = reinterpret_cast<std::int32_t*>(ids.data());
    upload(d_ids, all, stream);
    int at = 0;
    const double us = microseconds(stream, 200, [&] {
      const int layer = at % layers;
      resolve_experts(memory.view(), layer, d_ids + at * k, k, 0, experts, layer == 0, {}, stream);
      at = (at + 1) % cycle;
    });
    std::printf("resolve, %s, %d slots a layer, %2d misses: %.2f us\n", policy, slots_each, misses,
                us);
  }
}

void time_gather(cudaStream_t stream) {
  constexpr int experts = 256;
  constexpr std::size_t blob = 2764800, first = blob / 3 * 2;
  const PinnedSlab slab(experts * blob, 0, experts * blob);
  const std::vector<const std::byte*> store{slab.data()};
  const ExpertCacheMemory memory({1, experts, 128, 128, blob, first}, read_policy("lru"), store,
                                 stream);
  const ExpertCacheView& c = memory.view();
  for (const int n : {1, 2, 4, 10, 30, 128}) {
    std::vector<ExpertCacheView::Miss> misses;
    for (int i = 0; i < n; ++i) misses.push_back({(i * 37) % experts, i});
    upload(c.misses, misses, stream);
    upload(c.n_misses, {n}, stream);
    const int times = std::max(3, 200 / n);
    const double us = microseconds(stream, times, [&] { gather_experts(c, 0, stream); });
    std::vector<void*> to, from;
    std::vector<std::size_t> sizes(static_cast<std::size_t>(n), blob);
    for (const auto& m : misses) {
      to.push_back(c.slab + static_cast<std::size_t>(m.slot) * blob);
      from.push_back(slab.data() + static_cast<std::size_t>(m.expert) * blob);
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t index = 0;
    const double batch = microseconds(stream, times, [&] {
      check(
          cudaMemcpyBatchAsync(to.data(), const_cast<const void* const*>(from.data()), sizes.data(),
                               static_cast<std::size_t>(n), &attributes, &index, 1, stream),
          "cudaMemcpyBatchAsync");
    });
    const double gigabytes = double(n) * blob * 1e-3;
    std::printf(
        "gather, %3d experts: %8.1f us = %.1f GB/s; cudaMemcpyBatchAsync %8.1f us = %.1f GB/s\n", n,
        us, gigabytes / us, batch, gigabytes / batch);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const std::int64_t steps = argc > 1 ? std::atoll(argv[1]) : 100000;
  const Stream stream = make_stream();
  for (const char* policy : {"lru", "pool", "lrfu:64", "pool-lrfu:16"})
    if (!same(policy, steps, stream.get())) return 1;
  for (const auto& [blob, first] :
       {std::pair{2764800l, 1843200l}, {128l, 0l}, {32768l, 32768l}, {65664l, 32896l}})
    if (!gathers(blob, first, stream.get())) return 1;
  time_resolve("lru", 181, stream.get());
  time_resolve("lrfu", 181, stream.get());
  time_resolve("pool", 181, stream.get());
  time_gather(stream.get());
} catch (const Error& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
