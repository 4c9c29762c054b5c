// What the machine offers: instruction sets, processors, memory that may really be used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace imp {

struct CpuFeatures {
  bool avx2 = false;    // AVX2, FMA, F16C and BMI2, with the registers enabled by the system
  bool avx512 = false;  // AVX-512 F, BW, VL, DQ, with the registers enabled
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool amx_int8 = false;  // only after the kernel granted this process the tile registers
};

// Asks the processor and the kernel. The AMX request concerns the whole process and has to come
// before any worker thread starts; without the grant the first tile instruction would be SIGILL.
CpuFeatures cpu_features(bool request_amx = false);
std::string describe(const CpuFeatures&);

// Processors that this process may run on (affinity mask and cgroup quota).
int usable_processors();

struct MemoryInfo {
  std::int64_t total_bytes = 0;
  std::int64_t available_bytes =
      0;                   // min(MemAvailable, headroom of every cgroup above this process)
  std::string limited_by;  // "MemAvailable" or the cgroup file that decided
};
MemoryInfo memory_info();
// The same from another root, for tests: `proc` and `sys` replace /proc and /sys/fs/cgroup.
MemoryInfo memory_info(const std::string& proc, const std::string& sys);

// One sentence for memory that the system does not lock: `pinned` of `needed` bytes are, `reason`
// is the system's. Names the limits of this process and what can be done.
std::string pinning_refusal(std::size_t needed, std::size_t pinned, const std::string& reason);
std::string pinning_refusal(std::size_t needed, std::size_t pinned, const std::string& reason,
                            std::int64_t locked_limit, const MemoryInfo&);  // -1 = unlimited

std::int64_t peak_rss_bytes();

}  // namespace imp
