// All experts of a model in pinned, mapped host memory, one blob each, packed as the device's
// kernels read them. C++20-clean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpp/graph/tensor.h"
#include "cpp/memory/expert_check.h"
#include "cuda/context.h"
#include "cuda/expert_cache.h"

namespace imp::cuda {

// Gate, up and down of one layer.
struct ExpertLayer {
  const ExpertBank* banks[3] = {};
};

// Where the parts of a blob lie. Fails (unsupported) for types without kernels.
ExpertBlob blob_of(const ExpertLayer&);

// Memory that the device reads through the bus. Pages are touched by all threads, then pinned.
class PinnedSlab {
 public:
  PinnedSlab() = default;
  // A part of `all` bytes, of which `pinned` are there; fails with out_of_memory, naming them and
  // the limits of the machine, if the system gives or pins less.
  PinnedSlab(std::size_t bytes, std::size_t pinned, std::size_t all);
  ~PinnedSlab();
  PinnedSlab(PinnedSlab&& other) noexcept { *this = std::move(other); }
  PinnedSlab& operator=(PinnedSlab&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class ExpertStore {
 public:
  // Makes and fills it. `ram_limit`: bytes of host memory that it may take at most; 0 = what is
  // available, less a headroom. Fails with out_of_memory (both numbers) before the first byte is
  // read, with unsupported if the layers' experts differ in shape or type, and with io for what
  // cannot be read. `verify`: take checksums, then read everything once more and compare (io).
  ExpertStore(const std::vector<ExpertLayer>&, std::size_t ram_limit, bool verify, cudaStream_t);

  const ExpertBlob& blob() const { return blob_; }
  const std::vector<const std::byte*>& layers() const { return layers_; }
  std::size_t bytes() const { return bytes_; }
  double pin_seconds() const { return pin_seconds_; }
  double fill_seconds() const { return fill_seconds_; }
  // [layers * experts] Hash of each blob as it was read; empty without `verify`.
  const std::vector<std::uint64_t>& checksums() const { return checksums_; }
  // Blobs that are no longer those.
  std::vector<DamagedExpert> damaged() const;

 private:
  std::size_t experts() const { return each_ / blob_.bytes; }
  // Calls f(first, count) for groups of a layer's experts.
  template <class F>
  void by_groups(F f) const;
  // Experts [first, first + n) of a layer as blobs.
  void pack(const ExpertLayer&, std::size_t first, std::size_t n, std::byte* to, cudaStream_t);
  std::vector<std::uint64_t> hash_all() const;
  void read_again(const std::vector<ExpertLayer>&, cudaStream_t);

  ExpertBlob blob_;
  std::vector<PinnedSlab> slabs_;
  std::vector<const std::byte*> layers_;
  std::size_t bytes_ = 0, each_ = 0;  // each: of a layer
  std::vector<std::uint64_t> checksums_;
  double pin_seconds_ = 0, fill_seconds_ = 0;
  // While it is filled: experts as in the file, on the host and on the device, then as blobs.
  PinnedMemory read_;
  DeviceMemory raw_, packed_;
};

// Left free beside the store when nobody sets a limit.
inline constexpr std::size_t ram_headroom_bytes = std::size_t{4} << 30;

}  // namespace imp::cuda
