// Enumeration through the runtime alone: it finds the driver by itself, or says that there is none.
#include "cuda/device.h"

#include <cuda_runtime_api.h>

#include <iomanip>
#include <sstream>
#include <string_view>

#include "cpp/core/error.h"
#include "cpp/runtime/backend.h"
#include "cuda/check.h"
#include "cuda/launch.h"

namespace imp::cuda {
namespace {

std::string version(int v) { return str(v / 1000, ".", v % 1000 / 10); }

std::string gib(std::size_t bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << static_cast<double>(bytes) / (1 << 30) << " GiB";
  return out.str();
}

Device look_at(int index) {
  Device d;
  d.index = index;
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, index) == cudaSuccess) {
    d.name = properties.name;
    d.major = properties.major;
    d.minor = properties.minor;
    d.processors = properties.multiProcessorCount;
    d.total_bytes = properties.totalGlobalMem;
  }
  if (cudaSetDevice(index) == cudaSuccess) {
    cudaMemGetInfo(&d.free_bytes, &d.total_bytes);
    d.has_code = code_version() > 0;
  }
  cudaGetLastError();
  return d;
}

}  // namespace

Devices find_devices() {
  Devices all;
  cudaRuntimeGetVersion(&all.runtime);
  cudaDriverGetVersion(&all.driver);
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  cudaGetLastError();
  if (all.driver == 0) {
    all.problem = "no NVIDIA driver is installed";
  } else if (status == cudaErrorInsufficientDriver) {
    all.problem = str("the NVIDIA driver supports CUDA ", version(all.driver),
                      ", this build needs CUDA ", version(all.runtime));
  } else if (status != cudaSuccess && status != cudaErrorNoDevice) {
    all.problem = str("cudaGetDeviceCount: ", cudaGetErrorString(status));
  } else if (count == 0) {
    all.problem = str("the NVIDIA driver (CUDA ", version(all.driver), ") shows no device");
  } else {
    int current = 0;
    cudaGetDevice(&current);
    for (int i = 0; i < count; ++i) all.list.push_back(look_at(i));
    cudaSetDevice(current);
  }
  return all;
}

std::string describe(const Device& d, const Devices& all) {
  return str(d.name, ", sm_", d.major, d.minor, ", ", gib(d.free_bytes), " of ", gib(d.total_bytes),
             " free, driver CUDA ", version(all.driver), ", runtime ", version(all.runtime));
}

const char* architectures() { return IMP_CUDA_ARCHITECTURES; }

std::string no_code(const Device& d) {
  return str(d.name, " is sm_", d.major, d.minor, ", and this build holds code for ",
             architectures(), " only");
}

// Code for older devices does not wait inside of its kernels.
bool overlaps_launches() { return limits().code >= 90; }

const Limits& limits() {
  static const Limits known = [] {
    int device = 0, processors = 0, shared = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "cudaDeviceGetAttribute");
    const int code = code_version();
    const bool groups =
        code == 90 && std::string_view(architectures()).find("sm_90a") != std::string_view::npos;
    return Limits{code, processors, static_cast<std::size_t>(shared), groups};
  }();
  return known;
}

}  // namespace imp::cuda

namespace imp {

CudaStatus cuda_status() {
  const cuda::Devices all = cuda::find_devices();
  const char* held = cuda::architectures();
  if (all.list.empty()) return {true, false, all.problem, held};
  for (const cuda::Device& d : all.list)
    if (d.has_code) return {true, true, cuda::describe(d, all), held, d.free_bytes, d.total_bytes};
  return {true, false, cuda::no_code(all.list.front()), held};
}

}  // namespace imp
