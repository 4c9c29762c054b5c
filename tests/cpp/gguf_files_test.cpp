// GGUF files on disk: mapping, split files, the limit of shards.
#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "cpp/core/error.h"
#include "cpp/gguf/gguf.h"
#include "tests/cpp/gguf_bytes.h"

namespace imp::gguf::test {
namespace {

class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "imp_gguf_XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  std::string write(const std::string& name, const Bytes& bytes) const {
    std::ofstream out(file(name), std::ios::binary);
    out.write(reinterpret_cast<const char*>(bytes.span().data()),
              static_cast<std::streamsize>(bytes.size()));
    return file(name);
  }

 private:
  std::filesystem::path path_;
};

void refused(const std::string& path, ErrorCode code, const std::vector<std::string>& parts,
             const Limits& limits = {}) {
  try {
    Gguf::open(path, limits);
  } catch (const Error& e) {
    const std::string message = e.what();
    INFO(message);
    CHECK(e.code() == code);
    for (const std::string& part : parts) {
      INFO(part);
      CHECK(message.find(part) != std::string::npos);
    }
    return;
  }
  FAIL("accepted");
}

// Shard `no` of `count` with one tensor that holds `value`.
Bytes shard(std::uint16_t no, std::uint16_t count, std::int32_t total, const std::string& tensor,
            float value) {
  return Bytes()
      .header(1, 4)
      .key("split.no", ValueType::u16)
      .put(no)
      .key("split.count", ValueType::u16)
      .put(count)
      .key("split.tensors.count", ValueType::i32)
      .put(total)
      .key("owner", ValueType::u16)
      .put(no)
      .tensor(tensor, {1}, 0, 0)
      .pad()
      .put(value);
}

std::string write_three(const TempDir& dir) {
  dir.write("m-00002-of-00003.gguf", shard(1, 3, 3, "b", 2));
  dir.write("m-00003-of-00003.gguf", shard(2, 3, 3, "c", 3));
  return dir.write("m-00001-of-00003.gguf", shard(0, 3, 3, "a", 1));
}

}  // namespace

TEST_CASE("a mapped file") {
  const TempDir dir;
  const std::string path = dir.write("f", Bytes().text("content").zeros(10000));
  const auto file = MappedFile::open(path);
  CHECK(file->path() == path);
  CHECK(file->bytes().size() == 10007);
  CHECK(file->bytes()[1] == std::byte{'o'});
  for (const auto advice : {MappedFile::Advice::normal, MappedFile::Advice::random,
                            MappedFile::Advice::will_need, MappedFile::Advice::dont_need})
    for (const std::size_t offset : {0, 5000, 20000}) file->advise(offset, 100000, advice);
  CHECK(file->bytes()[1] == std::byte{'o'});
  CHECK_THROWS_AS(MappedFile::open(dir.file("absent")), Error);
}

TEST_CASE("what is no file of data") {
  const TempDir dir;
  refused(dir.file("absent"), ErrorCode::io, {dir.file("absent"), "No such file"});
  refused(dir.file(""), ErrorCode::bad_file, {"not a regular file"});
  refused(dir.write("empty", {}), ErrorCode::bad_file, {"is empty"});
  REQUIRE(::mkfifo(dir.file("pipe").c_str(), 0600) == 0);
  refused(dir.file("pipe"), ErrorCode::bad_file, {"not a regular file"});  // and does not wait
}

TEST_CASE("the views outlive the file's name") {
  const TempDir dir;
  const std::string path = dir.write("m.gguf", shard(0, 1, 1, "a", 4));
  const auto g = Gguf::open(path);
  std::filesystem::remove(path);
  float value;
  std::memcpy(&value, g->find("a")->data, sizeof value);
  CHECK(value == 4);
}

TEST_CASE("any shard opens all") {
  const TempDir dir;
  write_three(dir);
  for (const char* name :
       {"m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"}) {
    const auto g = Gguf::open(dir.file(name));
    CHECK(g->path() == dir.file(name));
    REQUIRE(g->files().size() == 3);
    CHECK(g->files()[2]->path() == dir.file("m-00003-of-00003.gguf"));
    CHECK(g->keys().integer("owner") == 0);  // the keys of the first
    REQUIRE(g->tensors().size() == 3);
    const char* names[] = {"a", "b", "c"};
    for (int i = 0; i < 3; ++i) {
      const TensorInfo& t = g->tensors()[static_cast<std::size_t>(i)];
      CHECK(t.name == names[i]);
      CHECK(t.shard == i);
      float value;
      std::memcpy(&value, t.data, sizeof value);
      CHECK(value == static_cast<float>(i + 1));
    }
  }
}

TEST_CASE("a first shard without tensors") {
  const TempDir dir;
  dir.write("m-00002-of-00002.gguf", shard(1, 2, 1, "b", 2));
  const auto first = Bytes()
                         .header(0, 3)
                         .key("split.no", ValueType::u16)
                         .put(std::uint16_t{0})
                         .key("split.count", ValueType::u16)
                         .put(std::uint16_t{2})
                         .key("split.tensors.count", ValueType::i32)
                         .put(1);
  CHECK(Gguf::open(dir.write("m-00001-of-00002.gguf", first))->tensors().size() == 1);
}

TEST_CASE("split files that do not fit together") {
  const TempDir dir;
  const std::string first = write_three(dir);
  const auto second = [&](const Bytes& bytes) { dir.write("m-00002-of-00003.gguf", bytes); };

  SUBCASE("missing") {
    std::filesystem::remove(dir.file("m-00002-of-00003.gguf"));
    refused(first, ErrorCode::io, {"file 2 of 3 is missing", "m-00002-of-00003.gguf"});
  }
  SUBCASE("the name is not of the pattern") {
    const std::string renamed = dir.file("renamed.gguf");
    std::filesystem::copy_file(first, renamed);
    refused(renamed, ErrorCode::bad_file, {"file 1 of 3", "-00001-of-00003.gguf"});
  }
  SUBCASE("number") {
    second(shard(2, 3, 3, "b", 2));
    refused(first, ErrorCode::bad_file, {"m-00002-of-00003.gguf", "split.no is 2", "needs 1"});
  }
  SUBCASE("count") {
    second(shard(1, 4, 3, "b", 2));
    refused(first, ErrorCode::bad_file, {"m-00002-of-00003.gguf", "split.count is 4", "needs 3"});
  }
  SUBCASE("no split keys") {
    second(Bytes().header(0, 0));
    refused(first, ErrorCode::bad_file, {"m-00002-of-00003.gguf", "split.no is missing"});
  }
  SUBCASE("key of the wrong type") {
    second(Bytes().header(0, 1).key("split.no", ValueType::string).string("x"));
    refused(first, ErrorCode::bad_file, {"m-00002-of-00003.gguf: key split.no is string"});
  }
  SUBCASE("a tensor in two shards") {
    second(shard(1, 3, 3, "a", 2));
    refused(first, ErrorCode::bad_file, {"m-00002-of-00003.gguf", "'a'", "twice"});
  }
  SUBCASE("total") {
    dir.write("m-00001-of-00003.gguf", shard(0, 3, 4, "a", 1));
    refused(first, ErrorCode::bad_file, {"split.tensors.count is 4", "3 files have 3 tensors"});
  }
  SUBCASE("damaged") {
    second(Bytes().header(1, 0));
    refused(first, ErrorCode::bad_file, {"m-00002-of-00003.gguf: truncated"});
  }
  SUBCASE("number outside the count") {
    dir.write("m-00001-of-00003.gguf", shard(3, 3, 3, "a", 1));
    refused(first, ErrorCode::bad_file, {"split.no is 3", "0 to 2"});
  }
}

TEST_CASE("limit: shards") {
  const TempDir dir;
  const std::string first = write_three(dir);
  Limits limits;
  limits.shards = 3;
  CHECK(Gguf::open(first, limits)->files().size() == 3);
  limits.shards = 2;
  refused(first, ErrorCode::unsupported, {"split into 3 files", "up to 2"}, limits);
  refused(dir.write("m-00001-of-10000.gguf", shard(0, 10000, 1, "a", 1)), ErrorCode::unsupported,
          {"split into 10000 files", "up to 9999"});
}

}  // namespace imp::gguf::test
