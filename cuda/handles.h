// Owners of CUDA objects and memory: moved, never copied, released once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

#include "cuda/check.h"

namespace imp::cuda {

template <class T, cudaError_t (*Release)(T)>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T object) : object_(object) {}
  ~Handle() { reset(); }
  Handle(Handle&& other) noexcept : object_(std::exchange(other.object_, T{})) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      reset();
      object_ = std::exchange(other.object_, T{});
    }
    return *this;
  }
  T get() const { return object_; }
  // Never released: what a device that does not answer still holds.
  void leak() noexcept { object_ = T{}; }
  explicit operator bool() const { return object_ != T{}; }
  void reset() noexcept {
    if (object_ != T{}) Release(object_);  // fails only after a fault that was reported before
    object_ = T{};
  }

 private:
  T object_{};
};

using Stream = Handle<cudaStream_t, cudaStreamDestroy>;
using Event = Handle<cudaEvent_t, cudaEventDestroy>;
using CapturedGraph = Handle<cudaGraph_t, cudaGraphDestroy>;
using GraphProgram = Handle<cudaGraphExec_t, cudaGraphExecDestroy>;

inline Stream make_stream() {
  cudaStream_t s;
  check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return Stream(s);
}

inline Event make_event() {
  cudaEvent_t e;
  check(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return Event(e);
}

// Memory of one kind; `Release` tells which.
template <cudaError_t (*Release)(void*)>
class Memory {
 public:
  Memory() = default;
  Memory(void* p, std::size_t bytes) : p_(p), bytes_(bytes) {}
  std::byte* data() const { return static_cast<std::byte*>(p_.get()); }
  std::size_t size() const { return bytes_; }
  void leak() noexcept { p_.leak(); }

 private:
  Handle<void*, Release> p_;
  std::size_t bytes_ = 0;
};

using DeviceMemory = Memory<cudaFree>;
using PinnedMemory = Memory<cudaFreeHost>;

// Uninitialised; fails with out_of_memory naming `what`, the bytes asked for and the bytes free.
inline DeviceMemory device_memory(std::size_t bytes, const char* what) {
  void* p = nullptr;
  if (bytes == 0) return {};
  const cudaError_t status = cudaMalloc(&p, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    std::size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    fail(ErrorCode::out_of_memory,
         str(what, " needs ", bytes, " bytes of GPU memory, ", free, " of ", total, " are free"));
  }
  check(status, "cudaMalloc");
  return {p, bytes};
}

// Page-locked host memory, visible to the device under the same address.
inline PinnedMemory pinned_memory(std::size_t bytes, const char* what) {
  void* p = nullptr;
  if (bytes == 0) return {};
  const cudaError_t status = cudaHostAlloc(&p, bytes, cudaHostAllocMapped);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail(ErrorCode::out_of_memory, str(what, ": the system pins no ", bytes, " bytes of memory"));
  }
  check(status, "cudaHostAlloc");
  return {p, bytes};
}

}  // namespace imp::cuda
