// cuBLASLt, looked for at run time, for products of large BF16 matrices.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>

namespace imp::cuda {

// The part of cublasLt.h that imp calls, with its values: they are the library's binary interface.
// A build needs neither that header nor the library.
namespace lt {

using Status = int;  // 0 = done
struct Handle;
struct Operation;  // "matmul descriptor"
struct Layout;
struct Preference;
struct Algorithm {
  std::uint64_t data[8];
};
struct Choice {
  Algorithm algorithm;
  std::size_t workspace_bytes;
  Status status;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Choice) == 96);

inline constexpr int compute_32f = 68;                                     // cublasComputeType_t
inline constexpr std::int32_t transposed = 1;                              // cublasOperation_t
inline constexpr int operation_transa = 3;                                 // of the first matrix
inline constexpr int most_workspace_bytes = 1, reduction_scheme_mask = 3;  // preferences
inline constexpr std::uint32_t reduction_in_workspace = 2;  // in the type of the sums, in order

struct Library {
  std::string path;
  std::size_t version = 0;  // 10000 * major + 100 * minor + patch
  std::size_t (*get_version)();
  const char* (*status_string)(Status);
  Status (*create)(Handle**);
  Status (*destroy)(Handle*);
  Status (*operation_create)(Operation**, int compute_type, cudaDataType scale_type);
  Status (*operation_destroy)(Operation*);
  Status (*operation_set)(Operation*, int attribute, const void*, std::size_t bytes);
  Status (*layout_create)(Layout**, cudaDataType, std::uint64_t rows, std::uint64_t cols,
                          std::int64_t ld);
  Status (*layout_destroy)(Layout*);
  Status (*preference_create)(Preference**);
  Status (*preference_destroy)(Preference*);
  Status (*preference_set)(Preference*, int attribute, const void*, std::size_t bytes);
  Status (*choose)(Handle*, Operation*, Layout* a, Layout* b, Layout* c, Layout* d, Preference*,
                   int wanted, Choice*, int* found);
  Status (*matmul)(Handle*, Operation*, const void* alpha, const void* a, Layout*, const void* b,
                   Layout*, const void* beta, const void* c, Layout*, void* d, Layout*,
                   const Algorithm*, void* workspace, std::size_t workspace_bytes, cudaStream_t);
};

// One line that says which library was found and where, or why none is used.
struct Found {
  std::unique_ptr<const Library> library;
  std::string detail;
};
// Stays loaded if it is taken.
Found open(const std::string& file);
// Under its usual name, once for the process.
const Found& usual();

template <class T>
using Owned = std::unique_ptr<T, Status (*)(T*)>;

}  // namespace lt

// y = x w^T with fp32 sums; w bf16 [outputs, cols], x bf16 [rows, cols], y [rows, pitch(outputs)],
// cols % 8 == 0, all addresses on 256 bytes.
struct Product {
  std::int64_t outputs, rows, cols;
  const std::byte *w, *x;
  float* y;
  std::byte* workspace;  // CublasLt::workspace_bytes
};

// For one device. A shape's algorithm is chosen when it is first seen and depends on nothing else;
// split columns are summed in a fixed order.
class CublasLt {
 public:
  static constexpr std::size_t workspace_bytes = std::size_t{32} << 20;  // as NVIDIA recommends
  static constexpr std::int64_t pitch(std::int64_t outputs) { return (outputs + 31) / 32 * 32; }

  explicit CublasLt(const lt::Library&);
  void run(const Product&, cudaStream_t);

 private:
  struct Plan {
    lt::Owned<lt::Layout> w, x, y;
    lt::Algorithm algorithm;
  };
  const Plan& plan(const Product&);
  void check(lt::Status, const char* call) const;
  lt::Owned<lt::Layout> layout(cudaDataType, std::int64_t rows, std::int64_t cols, std::int64_t ld);

  const lt::Library& lt_;
  lt::Owned<lt::Handle> handle_;
  lt::Owned<lt::Operation> operation_;
  lt::Owned<lt::Preference> preference_;
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, Plan> plans_;
};

}  // namespace imp::cuda
