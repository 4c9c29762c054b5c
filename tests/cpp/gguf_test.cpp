// GGUF reader: well-formed files, malformed files built byte by byte, every limit at and above it.
#include "cpp/gguf/gguf.h"

#include <doctest/doctest.h>

#include <limits>

#include "cpp/core/error.h"
#include "tests/cpp/gguf_bytes.h"

namespace imp::gguf::test {
namespace {

constexpr std::uint32_t f32 = 0;
constexpr std::uint32_t q8_0 = 8;

std::shared_ptr<const Gguf> parse(const Bytes& file, const Limits& limits = {}) {
  return Gguf::parse(file.span(), "test.gguf", limits);
}

// The file is refused with this code, and the sentence names the file and has each part.
void refused(const Bytes& file, ErrorCode code, const std::vector<std::string>& parts,
             const Limits& limits = {}) {
  try {
    parse(file, limits);
  } catch (const Error& e) {
    const std::string message = e.what();
    INFO(message);
    CHECK(e.code() == code);
    CHECK(message.find("test.gguf: ") == 0);
    CHECK(message.find('\n') == std::string::npos);
    for (const std::string& part : parts) {
      INFO(part);
      CHECK(message.find(part) != std::string::npos);
    }
    return;
  }
  FAIL("accepted");
}

void bad(const Bytes& file, const std::vector<std::string>& parts) {
  refused(file, ErrorCode::bad_file, parts);
}
void unsupported(const Bytes& file, const std::vector<std::string>& parts) {
  refused(file, ErrorCode::unsupported, parts);
}

Bytes one_key(ValueType type) { return Bytes().header(0, 1).key("k", type); }
Bytes one_tensor(const std::vector<std::uint64_t>& dims, std::uint32_t type,
                 std::uint64_t offset = 0, std::size_t data = 4096) {
  return Bytes().header(1, 0).tensor("t", dims, type, offset).pad().zeros(data);
}
Bytes aligned(std::uint32_t alignment) {
  return Bytes()
      .header(1, 1)
      .key("general.alignment", ValueType::u32)
      .u32(alignment)
      .tensor("t", {8}, f32, 0)
      .pad(alignment == 0 || alignment > max_alignment ? 32 : alignment)
      .zeros(32);
}

// Keys of several types, two tensors.
Bytes sample() {
  return Bytes()
      .header(2, 3)
      .key("general.architecture", ValueType::string)
      .string("test")
      .key("a.list", ValueType::array)
      .array(ValueType::string, 2)
      .string("one")
      .string("two")
      .key("a.number", ValueType::u32)
      .u32(7)
      .tensor("first", {32, 2}, q8_0, 0)
      .tensor("second", {3}, f32, 96)
      .pad()
      .zeros(96 + 12);
}

}  // namespace

TEST_CASE("a well-formed file") {
  for (const std::uint32_t version : {2u, 3u}) {
    Bytes file = Bytes()
                     .header(2, 1, version)
                     .key("k", ValueType::u32)
                     .u32(7)
                     .tensor("first", {32, 2}, q8_0, 0)
                     .tensor("second", {3}, f32, 96)
                     .pad();
    const std::size_t start = file.size();
    file.zeros(96).put(1.5f).put(2.5f).put(3.5f);
    const auto g = parse(file);
    CHECK(g->version() == version);
    CHECK(g->keys().integer("k") == 7);
    CHECK(g->tensors().size() == 2);
    CHECK(g->find("third") == nullptr);
    const TensorInfo* t = g->find("second");
    REQUIRE(t != nullptr);
    CHECK(t->dims == std::vector<std::int64_t>{3});
    CHECK(t->dtype == DType::f32);
    CHECK(t->n_bytes == 12);
    CHECK(t->file_offset == start + 96);
    float values[3];
    std::memcpy(values, t->data, sizeof values);
    CHECK(values[2] == 3.5f);
    CHECK(g->find("first")->n_bytes == 68);
    CHECK(g->find("first")->n_elems() == 64);
  }
  CHECK(parse(Bytes().header(0, 0))->tensors().empty());
}

TEST_CASE("every shorter file is refused") {
  const Bytes whole = sample();
  CHECK(parse(whole)->tensors().size() == 2);
  for (std::size_t n = 1; n <= whole.size(); ++n) {
    Bytes part = whole;
    part.cut(n);
    INFO("without the last ", n, " bytes");
    CHECK_THROWS_AS(parse(part), Error);
  }
}

TEST_CASE("header") {
  bad(Bytes(), {"not a GGUF file"});
  bad(Bytes().text("GGU"), {"not a GGUF file"});
  bad(Bytes().text("GGML").u32(3).u64(0).u64(0), {"not a GGUF file"});
  for (const std::uint32_t version : {0u, 1u, 4u})
    unsupported(Bytes().header(0, 0, version), {"version " + std::to_string(version), "2 to 3"});
  unsupported(Bytes().header(0, 0, 0x03000000u), {"big-endian"});
  bad(Bytes().header(std::uint64_t{1} << 60, 0), {"1152921504606846976 tensors", "0 left"});
  bad(Bytes().header(0, ~std::uint64_t{0}), {"18446744073709551615 keys", "0 left"});
}

TEST_CASE("values of every type") {
  const auto g = parse(Bytes()
                           .header(0, 13)
                           .key("u8", ValueType::u8)
                           .put(std::uint8_t{255})
                           .key("i8", ValueType::i8)
                           .put(std::int8_t{-128})
                           .key("u16", ValueType::u16)
                           .put(std::uint16_t{65535})
                           .key("i16", ValueType::i16)
                           .put(std::int16_t{-32768})
                           .key("u32", ValueType::u32)
                           .u32(~0u)
                           .key("i32", ValueType::i32)
                           .put(std::numeric_limits<std::int32_t>::min())
                           .key("f32", ValueType::f32)
                           .put(0.1f)
                           .key("bool", ValueType::boolean)
                           .put(std::uint8_t{1})
                           .key("string", ValueType::string)
                           .string("text")
                           .key("array", ValueType::array)
                           .array(ValueType::array, 2)
                           .array(ValueType::boolean, 2)
                           .put(std::uint8_t{0})
                           .put(std::uint8_t{1})
                           .array(ValueType::f64, 1)
                           .put(0.25)
                           .key("u64", ValueType::u64)
                           .u64(~std::uint64_t{0})
                           .key("i64", ValueType::i64)
                           .put(std::numeric_limits<std::int64_t>::min())
                           .key("f64", ValueType::f64)
                           .put(0.1));
  const KeyValues& kv = g->keys();
  CHECK(kv.integer("u8") == 255);
  CHECK(kv.integer("i8") == -128);
  CHECK(kv.integer("u16") == 65535);
  CHECK(kv.integer("i16") == -32768);
  CHECK(kv.integer("u32") == 4294967295);
  CHECK(kv.integer("i32") == std::numeric_limits<std::int32_t>::min());
  CHECK(kv.integer("i64") == std::numeric_limits<std::int64_t>::min());
  CHECK(kv.number("f32") == doctest::Approx(0.1f));
  CHECK(kv.number("f64") == 0.1);
  CHECK(kv.number("i8") == -128.0);
  CHECK(kv.boolean("bool") == true);
  CHECK(kv.string("string") == "text");
  CHECK_THROWS_AS(kv.integer("u64"), Error);  // does not fit
  CHECK(std::get<std::uint64_t>(kv.find("u64")->data) == ~std::uint64_t{0});
  const auto& outer = std::get<Array>(kv.find("array")->data);
  const auto& inner = std::get<std::vector<Array>>(outer.data);
  REQUIRE(inner.size() == 2);
  CHECK(inner[0].element == ValueType::boolean);
  CHECK(std::get<std::vector<std::uint8_t>>(inner[0].data) == std::vector<std::uint8_t>{0, 1});
  CHECK(std::get<std::vector<double>>(inner[1].data) == std::vector<double>{0.25});
}

TEST_CASE("look-ups") {
  KeyValues kv;
  kv.set("n", {ValueType::i32, std::int64_t{-3}});
  kv.set("b", {ValueType::boolean, true});
  kv.set("s", {ValueType::string, std::string("x")});
  kv.set("a", {ValueType::array, Array{ValueType::i8, std::vector<std::int8_t>{1, -2}}});
  kv.set("p", {ValueType::array, Array{ValueType::u64, std::vector<std::uint64_t>{~0ull}}});
  kv.set("f", {ValueType::array, Array{ValueType::boolean, std::vector<std::uint8_t>{0, 1}}});
  kv.set("t", {ValueType::array, Array{ValueType::string, std::vector<std::string>{"y"}}});
  CHECK(!kv.integer("absent"));
  CHECK(!kv.strings("absent"));
  CHECK(!kv.booleans("absent"));
  CHECK(kv.integers("a") == std::vector<std::int64_t>{1, -2});
  CHECK(kv.unsigneds("p") == std::vector<std::uint64_t>{~0ull});
  CHECK(kv.booleans("f") == std::vector<bool>{false, true});
  CHECK(kv.strings("t") == std::vector<std::string>{"y"});
  CHECK(kv.need_integer("n") == -3);
  CHECK_THROWS_WITH_AS(kv.need_integer("absent"), "key absent is missing", Error);
  CHECK_THROWS_WITH_AS(kv.need_number("absent"), "key absent is missing", Error);
  CHECK_THROWS_WITH_AS(kv.integer("s"), "key s is string, an integer is needed", Error);
  CHECK_THROWS_WITH_AS(kv.integer("b"), "key b is bool, an integer is needed", Error);
  CHECK_THROWS_WITH_AS(kv.string("a"), "key a is an array of 2 i8, a string is needed", Error);
  CHECK_THROWS_WITH_AS(kv.integers("n"), "key n is i32, an array of integers is needed", Error);
  CHECK_THROWS_AS(kv.unsigneds("a"), Error);  // -2
  CHECK_THROWS_AS(kv.integers("p"), Error);   // 2^64 - 1
  CHECK_THROWS_AS(kv.integers("f"), Error);
  CHECK_THROWS_AS(kv.integers("t"), Error);
  CHECK_THROWS_AS(kv.strings("a"), Error);
  CHECK_THROWS_AS(kv.booleans("a"), Error);
  CHECK_THROWS_AS(kv.boolean("n"), Error);
  CHECK_THROWS_AS(kv.number("s"), Error);
}

TEST_CASE("malformed keys") {
  bad(Bytes().header(0, 1).string("").u32(0).zeros(16), {"key 1 of 1", "empty name"});
  bad(Bytes().header(0, 1).u64(~std::uint64_t{0}).zeros(16), {"18446744073709551615"});
  bad(Bytes().header(0, 1).string("k").u32(13).zeros(16), {"'k'", "type 13", "0 to 12"});
  bad(Bytes().header(0, 1).string("k").u32(9).u32(99).u64(0), {"'k'", "type 99", "0 to 12"});
  bad(Bytes().header(0, 2).key("k", ValueType::u32).u32(1).key("k", ValueType::u32).u32(1),
      {"'k'", "twice"});
  bad(one_key(ValueType::boolean).put(std::uint8_t{2}), {"'k'", "bool 2"});
  bad(one_key(ValueType::array).array(ValueType::boolean, 1).put(std::uint8_t{3}),
      {"'k'", "bool 3"});
  bad(one_key(ValueType::string).u64(std::uint64_t{1} << 63), {"'k'", "9223372036854775808"});
  bad(Bytes().header(0, 1).string("new\nline\xff").u32(13).zeros(16), {"'new\\x0aline\\xff'"});
}

TEST_CASE("an array that claims more than the file has fails before it is allocated") {
  for (std::uint32_t type = 0; type <= 12; ++type)
    for (const std::uint64_t count : {std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
      INFO("element type ", type);
      bad(one_key(ValueType::array).array(static_cast<ValueType>(type), count).zeros(64),
          {"truncated: key 'k'", std::to_string(count), "64 left"});
    }
}

TEST_CASE("limit: length of a name") {
  const std::string longest(max_name_bytes, 'n');
  const std::string longer(max_name_bytes + 1, 'n');
  const auto key = [](const std::string& name) {
    return Bytes().header(0, 1).key(name, ValueType::u8).put(std::uint8_t{1});
  };
  const auto tensor = [](const std::string& name) {
    return Bytes().header(1, 0).tensor(name, {1}, f32, 0).pad().zeros(4);
  };
  CHECK(parse(key(longest))->keys().has(longest));
  bad(key(longer), {"65536 bytes", "65535"});
  CHECK(parse(tensor(longest))->find(longest) != nullptr);
  bad(tensor(longer), {"65536 bytes", "65535"});
}

TEST_CASE("limit: depth of arrays") {
  const auto nested = [](int depth) {
    Bytes file = one_key(ValueType::array);
    for (int i = 1; i < depth; ++i) file.array(ValueType::array, 1);
    return file.array(ValueType::u8, 1).put(std::uint8_t{1});
  };
  CHECK(parse(nested(max_array_depth))->keys().has("k"));
  unsupported(nested(max_array_depth + 1), {"'k'", "5 deep", "up to 4"});
  unsupported(nested(5000), {"'k'", "up to 4"});
}

TEST_CASE("limit: bytes of metadata") {
  const Bytes file = sample();
  const Bytes metadata = sample().cut(96 + 12);  // and up to 31 bytes of padding
  Limits limits;
  limits.metadata_bytes = metadata.size();
  CHECK(parse(file, limits)->tensors().size() == 2);
  limits.metadata_bytes = metadata.size() - 32;
  refused(file, ErrorCode::unsupported, {"tensor 'second'", std::to_string(metadata.size() - 32)},
          limits);
  const Bytes exact = one_key(ValueType::u32).u32(1);
  limits.metadata_bytes = exact.size();
  CHECK(parse(exact, limits)->keys().integer("k") == 1);
  limits.metadata_bytes = exact.size() - 1;
  refused(exact, ErrorCode::unsupported, {"'k'", std::to_string(exact.size())}, limits);
}

TEST_CASE("limit: alignment") {
  for (const std::uint32_t alignment : {min_alignment, 32u, 64u, max_alignment}) {
    const auto g = parse(aligned(alignment));
    CHECK(g->find("t")->file_offset % alignment == 0);
  }
  for (const std::uint32_t alignment : {0u, min_alignment / 2, 48u, 2 * max_alignment, ~0u})
    bad(aligned(alignment),
        {"'general.alignment' is " + std::to_string(alignment), "8 to 1048576"});
  bad(Bytes().header(0, 1).key("general.alignment", ValueType::u64).u64(32), {"u64", "u32"});
}

TEST_CASE("limit: dimensions") {
  CHECK(parse(one_tensor({2, 2, 2, 2}, f32))->find("t")->n_elems() == 16);
  bad(one_tensor({2, 2, 2, 2, 2}, f32), {"'t'", "5 dimensions", "up to 4"});
  const auto scalar = parse(one_tensor({}, f32));
  CHECK(scalar->find("t")->dims == std::vector<std::int64_t>{1});
  CHECK(scalar->find("t")->n_bytes == 4);
  bad(one_tensor({2, 0}, f32), {"'t'", "size 0 in dimension 1 of 2"});
}

TEST_CASE("sizes that overflow") {
  const auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  bad(one_tensor({most + 1}, f32), {"'t'", "elements"});
  bad(one_tensor({std::uint64_t{1} << 32, std::uint64_t{1} << 31}, f32), {"'t'", "elements"});
  bad(one_tensor({std::uint64_t{1} << 32, std::uint64_t{1} << 32}, f32), {"'t'", "elements"});
  bad(one_tensor({most}, f32), {"'t' has more than", "bytes"});
  bad(one_tensor({std::uint64_t{1} << 62}, f32), {"'t' has more than", "bytes"});  // 2^64 bytes
  bad(one_tensor({std::uint64_t{1} << 62}, q8_0), {"'t'", "truncated"});
}

TEST_CASE("tensor types") {
  for (const TypeInfo& type : type_table()) {
    const auto id = static_cast<std::uint32_t>(type.dtype);
    const auto row = static_cast<std::uint64_t>(type.block_elems);
    if (id >= first_private_type) {  // never in a file
      unsupported(one_tensor({row}, id), {"'t'", "type id " + std::to_string(id)});
      continue;
    }
    CHECK(parse(one_tensor({row, 3}, id))->find("t")->n_bytes ==
          3 * static_cast<std::size_t>(type.block_bytes));
    if (row > 1) bad(one_tensor({row + 1}, id), {"'t'", std::string(type.name)});
  }
  for (const std::uint32_t id : {4u, 5u, 31u, 38u, 999u, 1001u, ~0u})
    unsupported(one_tensor({256}, id), {"'t'", "type id " + std::to_string(id)});
}

TEST_CASE("tensor data") {
  CHECK(parse(one_tensor({8}, f32, 0, 32))->tensors().size() == 1);
  CHECK(parse(one_tensor({7}, f32, 0, 28))->tensors().size() == 1);  // no padding at the end
  bad(one_tensor({8}, f32, 0, 31), {"'t'", "32 bytes at 64 + 0", "has 95"});
  CHECK(parse(one_tensor({8}, f32, 64, 96))->find("t")->file_offset == 64 + 64);
  bad(one_tensor({8}, f32, 64, 95), {"'t'", "at 64 + 64"});
  bad(one_tensor({8}, f32, 16), {"'t'", "offset 16", "alignment 32"});
  bad(one_tensor({8}, f32, ~std::uint64_t{0} - 31), {"'t'", "truncated"});
  const auto two = [](const char* second, std::uint64_t offset) {
    return Bytes()
        .header(2, 0)
        .tensor("t", {9}, f32, 0)
        .tensor(second, {8}, f32, offset)
        .pad()
        .zeros(256);
  };
  CHECK(parse(two("u", 64))->tensors().size() == 2);
  CHECK(parse(two("u", 128))->tensors().size() == 2);  // a gap
  bad(two("u", 32), {"'t'", "'u'", "overlap"});
  bad(two("u", 0), {"'t'", "'u'", "overlap"});
  bad(two("t", 64), {"'t'", "twice"});
  bad(Bytes().header(1, 0).tensor("", {1}, f32, 0).pad().zeros(4), {"tensor 1", "empty name"});
}

}  // namespace imp::gguf::test
