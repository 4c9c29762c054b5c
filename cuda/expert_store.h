// All experts of a model in pinned, mapped host memory, one blob each, packed as the device's
// kernels read them. C++20-clean.
#pragma once

#include <cstddef>
#include <vector>

#include "cpp/graph/tensor.h"
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
  // Fails with out_of_memory if the system gives or pins less.
  explicit PinnedSlab(std::size_t bytes);
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
  // read, and with unsupported if the layers' experts differ in shape or type.
  ExpertStore(const std::vector<ExpertLayer>&, std::size_t ram_limit, cudaStream_t);

  const ExpertBlob& blob() const { return blob_; }
  const std::vector<const std::byte*>& layers() const { return layers_; }
  std::size_t bytes() const { return bytes_; }
  double pin_seconds() const { return pin_seconds_; }
  double fill_seconds() const { return fill_seconds_; }

 private:
  void fill(const ExpertLayer&, std::byte* slab, cudaStream_t);

  ExpertBlob blob_;
  std::vector<PinnedSlab> slabs_;
  std::vector<const std::byte*> layers_;
  std::size_t bytes_ = 0;
  double pin_seconds_ = 0, fill_seconds_ = 0;
  // While it is filled: experts as in the file, on the host and on the device, then as blobs.
  PinnedMemory read_;
  DeviceMemory raw_, packed_;
};

// Left free beside the store when nobody sets a limit.
inline constexpr std::size_t ram_headroom_bytes = std::size_t{4} << 30;

}  // namespace imp::cuda
