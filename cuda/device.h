// Which CUDA devices are there, and why one can or cannot be used.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace imp::cuda {

struct Device {
  int index = 0;
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int processors = 0;        // multiprocessors
  std::size_t free_bytes = 0, total_bytes = 0;
  bool has_code = false;  // this build holds machine code for it
};

struct Devices {
  int driver = 0;       // CUDA version of the driver, 1000 * major + 10 * minor; 0 = no driver
  int runtime = 0;      // of the linked runtime
  std::string problem;  // why the list is empty; one line
  std::vector<Device> list;
};

// Never fails: problems are text. Does not keep a context on devices that it only looks at.
Devices find_devices();
// One line: name, compute capability, memory, versions.
std::string describe(const Device&, const Devices&);

// What this build holds: "sm_90a, sm_120a".
const char* architectures();
// Why a device without code cannot be used; one line.
std::string no_code(const Device&);

// Defined in probe.cu: the architecture (90 = 9.0) that the kernels were compiled for which the
// current device loads, 0 = it loads none.
int code_version();

// Of the current device.
struct Limits {
  int code = 0;  // code_version()
  int processors = 0;
  std::size_t block_shared = 0;  // bytes of shared memory that a block may ask for
  bool group_products = false;   // of warp groups (common/wgmma.cuh): code for sm_90a
};
const Limits& limits();

}  // namespace imp::cuda
