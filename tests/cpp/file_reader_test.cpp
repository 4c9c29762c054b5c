// Reading what a mapping would die of.
#include "cpp/core/file_reader.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "cpp/gguf/mapped_file.h"
#include "tests/cpp/errors.h"
#include "tests/cpp/temp_dir.h"

namespace imp {
namespace {

std::string read(const FileReader& file, std::size_t offset, std::size_t size) {
  std::vector<std::byte> to(size);
  file.read(offset, size, to.data());
  return {reinterpret_cast<const char*>(to.data()), size};
}

TEST_CASE("bytes of a file, and of one that became shorter") {
  const test::TempDir dir;
  const std::string path = dir.write("f", std::string(10000, 'a') + "bcd");
  const auto mapped = gguf::MappedFile::open(path);
  const FileReader& file = mapped->reader();
  CHECK(file.path() == path);
  CHECK(read(file, 9999, 4) == "abcd");
  CHECK(read(file, 10003, 0).empty());
  REQUIRE(::truncate(path.c_str(), 9000) == 0);
  CHECK(read(file, 8998, 2) == "aa");
  test::refused([&] { read(file, 8998, 3); }, ErrorCode::io,
                {path + " ends at byte 9000", "up to 9001", "became shorter"});
  test::refused([&] { read(file, 10000, 3); }, ErrorCode::io, {"ends at byte 9000", "up to 10003"});
}

TEST_CASE("what the system refuses is told") {
  const test::TempDir dir;
  const FileReader folder(::open(dir.path().c_str(), O_RDONLY), dir.path());
  test::refused([&] { read(folder, 7, 1); }, ErrorCode::io,
                {"cannot read " + dir.path() + " at byte 7: ", "directory"});
}

}  // namespace
}  // namespace imp
