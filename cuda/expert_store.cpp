// A group of experts at a time: threads read it from the file, the device packs it, and it comes
// back as blobs.
#include "cuda/expert_store.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <initializer_list>

#include "cpp/core/error.h"
#include "cpp/core/file_reader.h"
#include "cpp/core/hash.h"
#include "cpp/core/sysinfo.h"
#include "cpp/core/threads.h"
#include "cuda/check.h"
#include "cuda/watchdog.h"
#include "cuda/weights.h"

namespace imp::cuda {
namespace {

constexpr std::size_t group_bytes = std::size_t{64} << 20;  // of a group of experts

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

std::uint64_t hash_of(const std::byte* blob, std::size_t bytes) {
  Hash hash;
  hash.bytes(blob, bytes);
  return hash.value();
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
  const auto take = [&blob](std::size_t bytes) {
    const std::size_t at = blob.bytes;
    blob.bytes = up_to(at + bytes, blob_alignment);
    return at;
  };
  const auto scale_bytes = [&layer](int m) -> std::size_t {
    const BlockShape shape = block_shape(layer.banks[m]->expert.dtype);
    if (shape.block_bytes == 0) return 0;
    return file_bytes(*layer.banks[m]) / shape.block_bytes * shape.scale_bytes;
  };
  const auto place = [&](std::initializer_list<int> matrices) {
    for (const int m : matrices) blob.codes[m] = take(file_bytes(*layer.banks[m]) - scale_bytes(m));
    for (const int m : matrices) blob.scales[m] = take(scale_bytes(m));
  };
  place({ExpertBlob::gate, ExpertBlob::up});
  place({ExpertBlob::down});
  return blob;
}

PinnedSlab::PinnedSlab(std::size_t bytes, std::size_t pinned, std::size_t all) {
  constexpr std::size_t huge_page = std::size_t{2} << 20;
  const std::size_t size = up_to(bytes, huge_page);
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED)
    fail(ErrorCode::out_of_memory, pinning_refusal(all, pinned, std::strerror(errno)));
  madvise(p, size, MADV_HUGEPAGE);
  team().parallel_for(static_cast<std::int64_t>(size / huge_page), [&](std::int64_t i, int) {
    constexpr std::size_t page = 4096;
    for (std::size_t at = 0; at < huge_page; at += page)
      static_cast<std::byte*>(p)[static_cast<std::size_t>(i) * huge_page + at] = std::byte{};
  });
  const cudaError_t status =
      cudaHostRegister(p, size, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (status != cudaSuccess) {
    cudaGetLastError();
    munmap(p, size);
    fail(ErrorCode::out_of_memory, pinning_refusal(all, pinned, cudaGetErrorString(status)));
  }
  data_ = static_cast<std::byte*>(p);
  bytes_ = size;
}

PinnedSlab::~PinnedSlab() {
  if (data_ == nullptr) return;
  cudaHostUnregister(data_);
  munmap(data_, bytes_);
}

ExpertStore::ExpertStore(const std::vector<ExpertLayer>& layers, std::size_t ram_limit, bool verify,
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
  each_ = static_cast<std::size_t>(first.banks[0]->experts) * blob_.bytes;
  bytes_ = layers.size() * each_;
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
  {
    const Clock clock(pin_seconds_);  // all of it, before the first byte is read
    for (std::size_t l = 0; l < layers.size(); ++l) {
      slabs_.emplace_back(each_, l * each_, bytes_);
      layers_.push_back(slabs_.back().data());
    }
  }
  const Clock clock(fill_seconds_);
  std::size_t raw = 0;
  for (const ExpertBank* b : first.banks) raw += file_bytes(*b);
  const std::size_t group = std::clamp<std::size_t>(group_bytes / blob_.bytes, 1, experts());
  if (first.banks[0]->expert.seed == 0) read_ = pinned_memory(group * raw, "reading experts");
  raw_ = device_memory(group * raw, "packing experts");
  packed_ = device_memory(group * blob_.bytes, "packing experts");
  check(cudaMemsetAsync(packed_.data(), 0, packed_.size(), stream), "cudaMemsetAsync");
  for (std::size_t l = 0; l < layers.size(); ++l)
    by_groups([&](std::size_t e, std::size_t n) {
      pack(layers[l], e, n, slabs_[l].data() + e * blob_.bytes, stream);
    });
  if (verify) {
    checksums_ = hash_all();
    read_again(layers, stream);
  }
  read_ = {};
  raw_ = {};
  packed_ = {};
}

template <class F>
void ExpertStore::by_groups(F f) const {
  const std::size_t group = packed_.size() / blob_.bytes;
  for (std::size_t e = 0; e < experts(); e += group) f(e, std::min(group, experts() - e));
}

void ExpertStore::pack(const ExpertLayer& layer, std::size_t first, std::size_t n, std::byte* to,
                       cudaStream_t stream) {
  std::size_t at = 0;  // in raw_: [3][n] experts as in the file
  for (int m = 0; m < 3; ++m) {
    const ExpertBank& b = *layer.banks[m];
    const std::size_t bytes = file_bytes(b);
    if (b.expert.seed != 0) {
      fill_synthetic(b.expert, first * bytes / 4, n * bytes / 4, raw_.data() + at, stream);
    } else {
      team().parallel_for(static_cast<std::int64_t>(n), [&](std::int64_t i, int) {
        const auto e = static_cast<std::size_t>(i);
        const std::size_t from = (first + e) * b.expert_bytes;
        std::byte* copy = read_.data() + at + e * bytes;
        if (b.expert.file != nullptr)
          b.expert.file->read(b.expert.file_offset + from, bytes, copy);
        else
          std::memcpy(copy, b.expert.data + from, bytes);
      });
      check(cudaMemcpyAsync(raw_.data() + at, read_.data() + at, n * bytes, cudaMemcpyHostToDevice,
                            stream),
            "cudaMemcpyAsync");
    }
    const BlockShape shape = block_shape(b.expert.dtype);
    for (std::size_t e = 0; e < n; ++e) {
      const std::byte* from = raw_.data() + at + e * bytes;
      std::byte* blob = packed_.data() + e * blob_.bytes;
      if (shape.block_bytes == 0)
        check(cudaMemcpyAsync(blob + blob_.codes[m], from, bytes, cudaMemcpyDeviceToDevice, stream),
              "cudaMemcpyAsync");
      else
        pack_blocks(b.expert, can_tile(b.expert), from, 0, bytes / shape.block_bytes,
                    blob + blob_.codes[m], blob + blob_.scales[m], stream);
    }
    at += n * bytes;
  }
  check(cudaMemcpyAsync(to, packed_.data(), n * blob_.bytes, cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync");
  finish(stream, "filling the expert store");
}

std::vector<std::uint64_t> ExpertStore::hash_all() const {
  std::vector<std::uint64_t> hashes(layers_.size() * experts());
  team().parallel_for(std::ssize(hashes), [&](std::int64_t i, int) {
    const auto pair = static_cast<std::size_t>(i);
    const std::byte* layer = layers_[pair / experts()];
    hashes[pair] = hash_of(layer + pair % experts() * blob_.bytes, blob_.bytes);
  });
  return hashes;
}

void ExpertStore::read_again(const std::vector<ExpertLayer>& layers, cudaStream_t stream) {
  const PinnedMemory again = pinned_memory(packed_.size(), "reading experts again");
  for (std::size_t l = 0; l < layers.size(); ++l)
    by_groups([&](std::size_t e, std::size_t n) {
      pack(layers[l], e, n, again.data(), stream);
      team().parallel_for(static_cast<std::int64_t>(n), [&](std::int64_t i, int) {
        const std::size_t expert = e + static_cast<std::size_t>(i);
        const std::byte* blob = again.data() + static_cast<std::size_t>(i) * blob_.bytes;
        if (hash_of(blob, blob_.bytes) != checksums_[l * experts() + expert])
          fail(ErrorCode::io, str("expert ", expert, " of layer ", l,
                                  " differs when it is read a second time: file, memory or bus "
                                  "are not reliable"));
      });
    });
}

std::vector<DamagedExpert> ExpertStore::damaged() const {
  const std::vector<std::uint64_t> now = hash_all();
  std::vector<DamagedExpert> damaged;
  for (std::size_t i = 0; i < now.size(); ++i)
    if (now[i] != checksums_[i])
      damaged.push_back(
          {static_cast<std::int64_t>(i / experts()), static_cast<std::int64_t>(i % experts())});
  return damaged;
}

}  // namespace imp::cuda
