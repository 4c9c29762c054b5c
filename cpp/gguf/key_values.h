// Typed metadata: what a GGUF header holds, and what the converter is about to write. Both answer
// the same questions.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace imp::gguf {

// GGUF value type ids.
enum class ValueType : std::uint32_t {
  u8 = 0,
  i8 = 1,
  u16 = 2,
  i16 = 3,
  u32 = 4,
  i32 = 5,
  f32 = 6,
  boolean = 7,
  string = 8,
  array = 9,
  u64 = 10,
  i64 = 11,
  f64 = 12,
};

struct Value;
// Elements keep their width, so an array takes no more memory than the file (strings aside).
struct Array {
  ValueType element = ValueType::u8;
  std::variant<std::vector<std::uint8_t>, std::vector<std::int8_t>, std::vector<std::uint16_t>,
               std::vector<std::int16_t>, std::vector<std::uint32_t>, std::vector<std::int32_t>,
               std::vector<float>, std::vector<std::uint64_t>, std::vector<std::int64_t>,
               std::vector<double>, std::vector<std::string>, std::vector<Array>>
      data;  // booleans are u8 0 or 1 with element == boolean
  std::size_t size() const;
};
struct Value {
  ValueType type = ValueType::u8;
  std::variant<std::uint64_t, std::int64_t, double, bool, std::string, Array> data;
};

std::string_view name(ValueType type);

// Look-ups return nullopt for an absent key and fail (bad_file, naming key and both types) for one
// of the wrong type. Integers of any width and sign convert when the value fits.
class KeyValues {
 public:
  using Map = std::map<std::string, Value, std::less<>>;

  const Map& map() const { return map_; }
  void set(std::string key, Value value) {
    map_.insert_or_assign(std::move(key), std::move(value));
  }
  bool has(std::string_view key) const { return map_.find(key) != map_.end(); }
  const Value* find(std::string_view key) const;

  std::optional<std::int64_t> integer(std::string_view key) const;
  std::optional<double> number(std::string_view key) const;  // floats and integers
  std::optional<bool> boolean(std::string_view key) const;
  std::optional<std::string> string(std::string_view key) const;
  std::optional<std::vector<std::int64_t>> integers(std::string_view key) const;  // an array
  std::optional<std::vector<std::uint64_t>> unsigneds(std::string_view key) const;
  std::optional<std::vector<bool>> booleans(std::string_view key) const;
  std::optional<std::vector<std::string>> strings(std::string_view key) const;

  // As above, but an absent key fails.
  std::int64_t need_integer(std::string_view key) const;
  double need_number(std::string_view key) const;

 private:
  Map map_;
};

}  // namespace imp::gguf
