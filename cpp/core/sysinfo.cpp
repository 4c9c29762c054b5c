// cpuid, /proc/meminfo and the memory controllers of cgroup v1 and v2.
#include "cpp/core/sysinfo.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <thread>

#include "cpp/core/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace imp {
namespace {

#if defined(__x86_64__)
std::uint64_t enabled_state() {  // XCR0: which register files the system saves
  std::uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

constexpr std::uint64_t state_avx = 0x6, state_avx512 = 0xe6, state_amx = 0x60000;

bool request_tiles() {
  constexpr long arch_req_xcomp_perm = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, arch_req_xcomp_perm, tile_data) == 0;
}
#endif

std::optional<std::int64_t> read_number(const std::string& path) {
  std::ifstream in(path);
  std::string word;
  if (!(in >> word)) return std::nullopt;
  if (word == "max") return std::numeric_limits<std::int64_t>::max();
  try {
    return std::stoll(word);
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

std::int64_t stat_field(const std::string& path, const std::string& field) {
  std::ifstream in(path);
  std::string name;
  std::int64_t value;
  while (in >> name >> value)
    if (name == field) return value;
  return 0;
}

std::int64_t meminfo(const std::string& path, const std::string& field) {
  std::ifstream in(path);
  std::string line;
  while (std::getline(in, line)) {
    std::istringstream words(line);
    std::string name;
    std::int64_t kib;
    if (words >> name >> kib && name == field + ":") return kib * 1024;
  }
  return 0;
}

struct CgroupFiles {
  const char *limit, *usage, *cache;
};
constexpr CgroupFiles v2 = {"memory.max", "memory.current", "inactive_file"};
constexpr CgroupFiles v1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                            "total_inactive_file"};

// Takes the smallest headroom from the process's cgroup up to the root. Reclaimable file cache
// counts as free.
void limit_by(MemoryInfo& info, const std::string& root, std::string group,
              const CgroupFiles& files) {
  for (;;) {
    const std::string dir = root + group;
    const auto limit = read_number(dir + "/" + files.limit);
    const auto usage = read_number(dir + "/" + files.usage);
    if (limit && usage && *limit < info.total_bytes) {
      const std::int64_t used = *usage - stat_field(dir + "/memory.stat", files.cache);
      const std::int64_t headroom =
          std::max<std::int64_t>(0, *limit - std::max<std::int64_t>(0, used));
      if (headroom < info.available_bytes) {
        info.available_bytes = headroom;
        info.limited_by = dir + "/" + files.limit;
      }
    }
    if (group.empty() || group == "/") return;
    const std::size_t slash = group.find_last_of('/');
    group.resize(slash == std::string::npos ? 0 : slash);
  }
}

}  // namespace

CpuFeatures cpu_features([[maybe_unused]] bool request_amx) {
  CpuFeatures f;
#if defined(__x86_64__)
  std::uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return f;
  const std::uint64_t state = enabled_state();
  const bool fma = c & bit_FMA, f16c = c & bit_F16C;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  f.avx2 = (state & state_avx) == state_avx && (b & bit_AVX2) && (b & bit_BMI2) && fma && f16c;
  f.avx512 = f.avx2 && (state & state_avx512) == state_avx512 && (b & bit_AVX512F) &&
             (b & bit_AVX512BW) && (b & bit_AVX512VL) && (b & bit_AVX512DQ);
  f.avx512_vnni = f.avx512 && (c & bit_AVX512VNNI);
  const bool amx = (d & (1u << 25)) && (state & state_amx) == state_amx;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) f.avx512_bf16 = f.avx512 && (a & (1u << 5));
  f.amx_int8 = amx && request_amx && request_tiles();
#endif
  return f;
}

std::string describe(const CpuFeatures& f) {
  std::string s;
  const auto add = [&](bool has, const char* name) {
    if (has) s += (s.empty() ? "" : " ") + std::string(name);
  };
  add(f.avx2, "AVX2");
  add(f.avx512, "AVX512");
  add(f.avx512_vnni, "AVX512_VNNI");
  add(f.avx512_bf16, "AVX512_BF16");
  add(f.amx_int8, "AMX_INT8");
  return s.empty() ? "baseline" : s;
}

int usable_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int n = static_cast<int>(std::thread::hardware_concurrency());
  if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
  std::ifstream quota_file("/sys/fs/cgroup/cpu.max");
  double quota, period;
  if (quota_file >> quota >> period && period > 0 && quota > 0)
    n = std::min(n, std::max(1, static_cast<int>(quota / period)));
  return std::max(1, n);
}

MemoryInfo memory_info(const std::string& proc, const std::string& sys) {
  MemoryInfo info;
  info.total_bytes = meminfo(proc + "/meminfo", "MemTotal");
  info.available_bytes = meminfo(proc + "/meminfo", "MemAvailable");
  info.limited_by = "MemAvailable";
  std::ifstream groups(proc + "/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {  // id:controllers:path
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1),
                      path = line.substr(second + 1);
    if (controllers.empty()) {
      limit_by(info, sys, path, v2);
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      limit_by(info, sys + "/memory", path, v1);
      limit_by(info, sys + "/memory", "", v1);  // inside a container the path may not exist
    }
  }
  return info;
}

MemoryInfo memory_info() { return memory_info("/proc", "/sys/fs/cgroup"); }

std::string pinning_refusal(std::size_t needed, std::size_t pinned, const std::string& reason) {
  rlimit limit{};
  const bool known = getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return pinning_refusal(needed, pinned, reason,
                         known ? static_cast<std::int64_t>(limit.rlim_cur) : -1, memory_info());
}

std::string pinning_refusal(std::size_t needed, std::size_t pinned, const std::string& reason,
                            std::int64_t locked_limit, const MemoryInfo& memory) {
  const std::string locked = locked_limit < 0 ? "unlimited" : str(locked_limit, " bytes");
  return str("the experts need ", needed, " bytes of pinned memory, the system pins no more than ",
             pinned, " (", reason, "); locked memory is ", locked, " (ulimit -l), ",
             memory.available_bytes, " bytes are available (", memory.limited_by,
             "): raise what is too small, or run on the CPU (--device cpu, or --ram-limit below "
             "what is needed)");
}

std::int64_t peak_rss_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
}

}  // namespace imp
