// A group of experts at a time: threads read it from the file, the device packs it, and it comes
// back as blobs.
#include "cuda/expert_store.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "cpp/core/error.h"
#include "cpp/core/sysinfo.h"
#include "cpp/core/threads.h"
#include "cuda/check.h"
#include "cuda/weights.h"

namespace imp::cuda {
namespace {

constexpr std::size_t group_bytes = std::size_t{64} << 20;  // of a group of experts
constexpr std::size_t part_alignment = 16;

std::size_t up_to(std::size_t bytes, std::size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

std::size_t file_bytes(const ExpertBank& b) {
  return static_cast<std::size_t>(b.expert.rows) * b.expert.row_bytes;
}

ThreadPool& team() {
  static ThreadPool pool(std::clamp(usable_processors(), 1, 16));
  return pool;
}

class Clock {
 public:
  explicit Clock(double& seconds) : seconds_(seconds) {}
  ~Clock() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace

ExpertBlob blob_of(const ExpertLayer& layer) {
  ExpertBlob blob;
  std::size_t end = 0;
  for (int m = 0; m < 3; ++m) {
    const ExpertBank& b = *layer.banks[m];
    const BlockShape shape = block_shape(b.expert.dtype);
    const std::size_t bytes = file_bytes(b);
    const std::size_t scales =
        shape.block_bytes == 0 ? 0 : bytes / shape.block_bytes * shape.scale_bytes;
    blob.codes[m] = end;
    end = up_to(end + bytes - scales, part_alignment);
    blob.scales[m] = scales;
  }
  for (std::size_t& part : blob.scales) {
    const std::size_t at = end;
    end = up_to(end + part, part_alignment);
    part = at;
  }
  blob.bytes = up_to(end, blob_alignment);
  return blob;
}

PinnedSlab::PinnedSlab(std::size_t bytes) : bytes_(bytes) {
  constexpr std::size_t huge_page = std::size_t{2} << 20;
  bytes_ = up_to(bytes, huge_page);
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED)
    fail(ErrorCode::out_of_memory,
         str("expert store: the system gives no ", bytes_, " bytes: ", std::strerror(errno)));
  data_ = static_cast<std::byte*>(p);
  madvise(p, bytes_, MADV_HUGEPAGE);
  team().parallel_for(static_cast<std::int64_t>(bytes_ / huge_page), [&](std::int64_t i, int) {
    constexpr std::size_t page = 4096;
    for (std::size_t at = 0; at < huge_page; at += page)
      data_[static_cast<std::size_t>(i) * huge_page + at] = std::byte{};
  });
  const cudaError_t status =
      cudaHostRegister(data_, bytes_, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (status == cudaSuccess) return;
  cudaGetLastError();
  munmap(data_, bytes_);
  fail(ErrorCode::out_of_memory, str("expert store: the system pins no ", bytes_,
                                     " bytes of memory (", cudaGetErrorString(status), ")"));
}

PinnedSlab::~PinnedSlab() {
  if (data_ == nullptr) return;
  cudaHostUnregister(data_);
  munmap(data_, bytes_);
}

ExpertStore::ExpertStore(const std::vector<ExpertLayer>& layers, std::size_t ram_limit,
                         cudaStream_t stream) {
  if (layers.empty()) fail(ErrorCode::internal, "an expert store without layers");
  const ExpertLayer& first = layers.front();
  for (const ExpertLayer& layer : layers)
    for (int m = 0; m < 3; ++m) {
      const ExpertBank &a = *first.banks[m], &b = *layer.banks[m];
      if (a.experts != b.experts || a.expert.dtype != b.expert.dtype ||
          a.expert.rows != b.expert.rows || a.expert.cols != b.expert.cols)
        fail(ErrorCode::unsupported, "experts of different shapes or types cannot share a cache");
    }
  blob_ = blob_of(first);
  const auto experts = static_cast<std::size_t>(first.banks[0]->experts);
  const std::size_t each = experts * blob_.bytes;
  bytes_ = layers.size() * each;
  const MemoryInfo memory = memory_info();
  const auto available =
      static_cast<std::size_t>(std::max<std::int64_t>(memory.available_bytes, 0));
  if (ram_limit > 0 && bytes_ > ram_limit)
    fail(ErrorCode::out_of_memory,
         str("the experts need ", bytes_, " bytes of pinned memory, the ", "limit is ", ram_limit));
  if (bytes_ + ram_headroom_bytes > available)
    fail(ErrorCode::out_of_memory,
         str("the experts need ", bytes_, " bytes of pinned memory and ", ram_headroom_bytes,
             " beside it, ", available, " are available (", memory.limited_by, ")"));

  std::size_t raw = 0;
  for (const ExpertBank* b : first.banks) raw += file_bytes(*b);
  const std::size_t group = std::clamp<std::size_t>(group_bytes / blob_.bytes, 1, experts);
  if (first.banks[0]->expert.seed == 0) read_ = pinned_memory(group * raw, "reading experts");
  raw_ = device_memory(group * raw, "packing experts");
  packed_ = device_memory(group * blob_.bytes, "packing experts");
  check(cudaMemsetAsync(packed_.data(), 0, packed_.size(), stream), "cudaMemsetAsync");
  for (const ExpertLayer& layer : layers) {
    {
      const Clock clock(pin_seconds_);
      slabs_.emplace_back(each);
    }
    layers_.push_back(slabs_.back().data());
    const Clock clock(fill_seconds_);
    fill(layer, slabs_.back().data(), stream);
  }
  read_ = {};
  raw_ = {};
  packed_ = {};
}

void ExpertStore::fill(const ExpertLayer& layer, std::byte* slab, cudaStream_t stream) {
  const auto experts = static_cast<std::size_t>(layer.banks[0]->experts);
  const std::size_t group = packed_.size() / blob_.bytes;
  for (std::size_t e0 = 0; e0 < experts; e0 += group) {
    const std::size_t n = std::min(group, experts - e0);
    std::size_t at = 0;  // in raw_: [3][n] experts as in the file
    for (int m = 0; m < 3; ++m) {
      const ExpertBank& b = *layer.banks[m];
      const std::size_t bytes = file_bytes(b);
      if (b.expert.seed != 0) {
        fill_synthetic(b.expert, e0 * bytes / 4, n * bytes / 4, raw_.data() + at, stream);
      } else {
        team().parallel_for(static_cast<std::int64_t>(n), [&](std::int64_t i, int) {
          const auto e = static_cast<std::size_t>(i);
          std::memcpy(read_.data() + at + e * bytes, b.expert.data + (e0 + e) * b.expert_bytes,
                      bytes);
        });
        check(cudaMemcpyAsync(raw_.data() + at, read_.data() + at, n * bytes,
                              cudaMemcpyHostToDevice, stream),
              "cudaMemcpyAsync");
      }
      const BlockShape shape = block_shape(b.expert.dtype);
      for (std::size_t e = 0; e < n; ++e) {
        const std::byte* from = raw_.data() + at + e * bytes;
        std::byte* blob = packed_.data() + e * blob_.bytes;
        if (shape.block_bytes == 0)
          check(
              cudaMemcpyAsync(blob + blob_.codes[m], from, bytes, cudaMemcpyDeviceToDevice, stream),
              "cudaMemcpyAsync");
        else
          pack_blocks(b.expert, can_tile(b.expert), from, 0, bytes / shape.block_bytes,
                      blob + blob_.codes[m], blob + blob_.scales[m], stream);
      }
      at += n * bytes;
    }
    check(cudaMemcpyAsync(slab + e0 * blob_.bytes, packed_.data(), n * blob_.bytes,
                          cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
}

}  // namespace imp::cuda
