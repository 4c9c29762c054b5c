// Free memory from made-up /proc and /sys/fs/cgroup trees, and sanity of the real ones.
#include "cpp/core/sysinfo.h"

#include <doctest/doctest.h>

#include <thread>

#include "tests/cpp/temp_dir.h"

namespace imp {
namespace {

constexpr std::int64_t gib = std::int64_t{1} << 30;

// A machine of 64 GiB with 48 available.
struct Machine : test::TempDir {
  explicit Machine(const std::string& cgroup) {
    write("proc/meminfo",
          "MemTotal:       67108864 kB\nMemFree:         1048576 kB\n"
          "MemAvailable:   50331648 kB\nBuffers:            1024 kB\n");
    write("proc/self/cgroup", cgroup);
    write("sys/cgroup.controllers", "memory\n");
  }
  void v2(const std::string& group, const std::string& limit, std::int64_t used,
          std::int64_t cache = 0) const {
    write("sys" + group + "/memory.max", limit + "\n");
    write("sys" + group + "/memory.current", std::to_string(used) + "\n");
    write("sys" + group + "/memory.stat",
          "anon 5\nfile 9\ninactive_file " + std::to_string(cache) + "\nactive_file 7\n");
  }
  void v1(const std::string& group, std::int64_t limit, std::int64_t used,
          std::int64_t cache = 0) const {
    const std::string at = "sys/memory" + group;
    write(at + "/memory.limit_in_bytes", std::to_string(limit) + "\n");
    write(at + "/memory.usage_in_bytes", std::to_string(used) + "\n");
    write(at + "/memory.stat",
          "inactive_file 1\ntotal_inactive_file " + std::to_string(cache) + "\n");
  }
  MemoryInfo info() const { return memory_info(path("proc"), path("sys")); }
};

void check(const Machine& m, std::int64_t available, const std::string& limited_by) {
  const MemoryInfo info = m.info();
  CHECK(info.total_bytes == 64 * gib);
  CHECK(info.available_bytes == available);
  const std::string want = limited_by == "MemAvailable" ? limited_by : m.path("sys" + limited_by);
  CHECK(info.limited_by == want);
}

}  // namespace

TEST_CASE("memory without a cgroup limit") {
  check(Machine("0::/\n"), 48 * gib, "MemAvailable");
  check(Machine(""), 48 * gib, "MemAvailable");
  Machine unlimited("0::/user.slice/a.scope\n");
  unlimited.v2("/user.slice/a.scope", "max", 3 * gib);
  unlimited.v2("/user.slice", std::to_string(64 * gib), 60 * gib);  // as large as the machine
  check(unlimited, 48 * gib, "MemAvailable");
}

TEST_CASE("cgroup v2: the tightest group above the process counts, file cache as free") {
  Machine m("0::/a/b/c\n");
  m.v2("/a/b/c", "max", 2 * gib);
  m.v2("/a/b", std::to_string(16 * gib), 10 * gib, 3 * gib);
  check(m, 9 * gib, "/a/b/memory.max");
  m.v2("/a", std::to_string(20 * gib), 18 * gib);
  check(m, 2 * gib, "/a/memory.max");
  m.v2("/a/b/c", std::to_string(1 * gib), 2 * gib);  // beyond its limit: nothing left
  check(m, 0, "/a/b/c/memory.max");
}

TEST_CASE("cgroup v2: the limit at the root of a container") {
  Machine m("0::/\n");
  m.v2("", std::to_string(8 * gib), 1 * gib);
  const MemoryInfo info = m.info();
  CHECK(info.available_bytes == 7 * gib);
  CHECK(info.limited_by.ends_with("/memory.max"));
  // The path that /proc shows may lie outside what is mounted.
  Machine outside("0::/../other/pod\n");
  outside.v2("", std::to_string(8 * gib), 1 * gib);
  CHECK(outside.info().available_bytes == 7 * gib);
}

TEST_CASE("cgroup v1: the memory controller's hierarchy") {
  Machine m("5:cpu,cpuacct:/x\n4:memory:/docker/id\n1:name=systemd:/x\n");
  m.v1("/docker/id", 4 * gib, 3 * gib, 2 * gib);
  m.v1("", 0x7ffffffffffff000, 40 * gib);  // what an unlimited v1 group says
  check(m, 3 * gib, "/memory/docker/id/memory.limit_in_bytes");
  // Inside a container only the root exists.
  Machine inside("4:cpuset,memory:/docker/id\n");
  inside.v1("", 6 * gib, 1 * gib);
  check(inside, 5 * gib, "/memory/memory.limit_in_bytes");
}

TEST_CASE("damaged files are no limits") {
  Machine m("0::/a\nnonsense\n0:\n7::no-slash\n\n");
  m.write("sys/a/memory.max", "many\n");
  m.write("sys/a/memory.current", "");
  check(m, 48 * gib, "MemAvailable");
  m.write("sys/a/memory.max", "99999999999999999999999999\n");
  check(m, 48 * gib, "MemAvailable");
  test::TempDir empty;
  CHECK(memory_info(empty.path("proc"), empty.path("sys")).total_bytes == 0);
}

TEST_CASE("memory that cannot be pinned names its limits") {
  const MemoryInfo memory{8 * gib, 3 * gib, "/sys/a/memory.max"};
  const std::string limited = pinning_refusal(1000, 200, "out of memory", 65536, memory);
  CHECK(limited ==
        "the experts need 1000 bytes of pinned memory, the system pins no more than 200 (out of "
        "memory); locked memory is 65536 bytes (ulimit -l), 3221225472 bytes are available "
        "(/sys/a/memory.max): raise what is too small, or run on the CPU (--device cpu, or "
        "--ram-limit below what is needed)");
  CHECK(pinning_refusal(1, 0, "x", -1, memory).find("locked memory is unlimited") !=
        std::string::npos);
  CHECK(pinning_refusal(1, 0, "x").find(memory_info().limited_by) != std::string::npos);
}

TEST_CASE("this machine") {
  const MemoryInfo info = memory_info();
  CHECK(info.total_bytes > 0);
  CHECK(info.available_bytes > 0);
  CHECK(info.available_bytes <= info.total_bytes);
  CHECK(usable_processors() >= 1);
  CHECK(usable_processors() <= 65536);
  CHECK(peak_rss_bytes() > (1 << 20));
  const CpuFeatures f = cpu_features();
  if (f.avx512) CHECK(f.avx2);
  CHECK_FALSE(describe(f).empty());
  CHECK(describe({}) == "baseline");
}

}  // namespace imp
