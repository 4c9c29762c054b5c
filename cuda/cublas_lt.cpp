// Where cuBLASLt is looked for: the search path of the process, then the `nvidia-cublas` package
// beside imp and the toolkit's usual folder (the run path that CMakeLists.txt gives).
#include "cuda/cublas_lt.h"

#include <dlfcn.h>

#include "cpp/core/error.h"
#include "cpp/runtime/backend.h"

namespace imp::cuda {
namespace lt {
namespace {

constexpr std::size_t major = CUDART_VERSION / 1000;

std::string version(std::size_t v) { return str(v / 10000, ".", v / 100 % 100, ".", v % 100); }

// Takes entry points until one is missing.
struct Symbols {
  void* library;
  std::string missing;
  template <class F>
  void operator()(F& f, const char* name) {
    f = reinterpret_cast<F>(dlsym(library, name));
    if (f == nullptr && missing.empty()) missing = name;
  }
};

Found none(const std::string& why) {
  return {nullptr, str("none, large BF16 maps take imp's own kernels: ", why)};
}

}  // namespace

Found open(const std::string& file) {
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    return none(str(dlerror(), "; it comes with the CUDA toolkit and with `pip install ",
                    "nvidia-cublas`"));
  auto found = std::make_unique<Library>();
  Library& f = *found;
  Symbols take{library, {}};
  take(f.get_version, "cublasLtGetVersion");
  take(f.status_string, "cublasLtGetStatusString");
  take(f.create, "cublasLtCreate");
  take(f.destroy, "cublasLtDestroy");
  take(f.operation_create, "cublasLtMatmulDescCreate");
  take(f.operation_destroy, "cublasLtMatmulDescDestroy");
  take(f.operation_set, "cublasLtMatmulDescSetAttribute");
  take(f.layout_create, "cublasLtMatrixLayoutCreate");
  take(f.layout_destroy, "cublasLtMatrixLayoutDestroy");
  take(f.preference_create, "cublasLtMatmulPreferenceCreate");
  take(f.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  take(f.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  take(f.choose, "cublasLtMatmulAlgoGetHeuristic");
  take(f.matmul, "cublasLtMatmul");
  std::string why;
  if (!take.missing.empty()) {
    why = str(file, " has no ", take.missing);
  } else if (f.version = f.get_version(); f.version / 10000 != major) {
    why = str(file, " is version ", version(f.version), ", this build needs ", major);
  }
  if (!why.empty()) {
    dlclose(library);
    return none(why);
  }
  Dl_info info;
  f.path = dladdr(reinterpret_cast<void*>(f.get_version), &info) != 0 ? info.dli_fname : file;
  std::string detail = str(version(f.version), ", ", f.path);
  return {std::move(found), std::move(detail)};
}

const Found& usual() {
  static const Found found = open(str("libcublasLt.so.", major));
  return found;
}

}  // namespace lt

namespace {

template <class T, class Create>
T* created(Create create) {
  T* made = nullptr;
  create(&made);
  return made;
}

}  // namespace

CublasLt::CublasLt(const lt::Library& library)
    : lt_(library),
      handle_(nullptr, lt_.destroy),
      operation_(nullptr, lt_.operation_destroy),
      preference_(nullptr, lt_.preference_destroy) {
  handle_.reset(created<lt::Handle>([&](auto to) { check(lt_.create(to), "cublasLtCreate"); }));
  operation_.reset(created<lt::Operation>([&](auto to) {
    check(lt_.operation_create(to, lt::compute_32f, CUDA_R_32F), "cublasLtMatmulDescCreate");
  }));
  // Its matrices have columns one after the other: w is stored as the transpose of what it says.
  check(lt_.operation_set(operation_.get(), lt::operation_transa, &lt::transposed,
                          sizeof(lt::transposed)),
        "cublasLtMatmulDescSetAttribute");
  preference_.reset(created<lt::Preference>(
      [&](auto to) { check(lt_.preference_create(to), "cublasLtMatmulPreferenceCreate"); }));
  const auto prefer = [&](int attribute, auto value) {
    check(lt_.preference_set(preference_.get(), attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(lt::most_workspace_bytes, std::uint64_t{workspace_bytes});
  prefer(lt::reduction_scheme_mask, lt::reduction_in_workspace);
}

void CublasLt::run(const Product& p, cudaStream_t stream) {
  const Plan& plan = this->plan(p);
  const float alpha = 1, beta = 0;
  check(lt_.matmul(handle_.get(), operation_.get(), &alpha, p.w, plan.w.get(), p.x, plan.x.get(),
                   &beta, p.y, plan.y.get(), p.y, plan.y.get(), &plan.algorithm, p.workspace,
                   workspace_bytes, stream),
        "cublasLtMatmul");
}

const CublasLt::Plan& CublasLt::plan(const Product& p) {
  const std::tuple key{p.outputs, p.rows, p.cols};
  if (const auto it = plans_.find(key); it != plans_.end()) return it->second;
  Plan plan{layout(CUDA_R_16BF, p.cols, p.outputs, p.cols),
            layout(CUDA_R_16BF, p.cols, p.rows, p.cols),
            layout(CUDA_R_32F, p.outputs, p.rows, pitch(p.outputs)),
            {}};
  lt::Choice choice{};
  int found = 0;
  check(lt_.choose(handle_.get(), operation_.get(), plan.w.get(), plan.x.get(), plan.y.get(),
                   plan.y.get(), preference_.get(), 1, &choice, &found),
        "cublasLtMatmulAlgoGetHeuristic");
  if (found == 0)
    fail(ErrorCode::internal, str("cuBLASLt has no algorithm for a product of [", p.rows, ", ",
                                  p.cols, "] and [", p.outputs, ", ", p.cols, "]"));
  check(choice.status, "cublasLtMatmulAlgoGetHeuristic");
  plan.algorithm = choice.algorithm;
  return plans_.emplace(key, std::move(plan)).first->second;
}

lt::Owned<lt::Layout> CublasLt::layout(cudaDataType type, std::int64_t rows, std::int64_t cols,
                                       std::int64_t ld) {
  return {created<lt::Layout>([&](auto to) {
            check(lt_.layout_create(to, type, static_cast<std::uint64_t>(rows),
                                    static_cast<std::uint64_t>(cols), ld),
                  "cublasLtMatrixLayoutCreate");
          }),
          lt_.layout_destroy};
}

void CublasLt::check(lt::Status status, const char* call) const {
  if (status != 0)
    fail(ErrorCode::internal, str(call, ": ", lt_.status_string(status), " (", status, ")"));
}

}  // namespace imp::cuda

namespace imp {

CublasLtStatus cublas_lt_status(const std::string& file) {
  if (file.empty()) return {cuda::lt::usual().library != nullptr, cuda::lt::usual().detail};
  const cuda::lt::Found found = cuda::lt::open(file);
  return {found.library != nullptr, found.detail};
}

}  // namespace imp
