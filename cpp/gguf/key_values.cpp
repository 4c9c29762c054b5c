// Typed look-ups of metadata.
#include "cpp/gguf/key_values.h"

#include <limits>
#include <type_traits>
#include <utility>

#include "cpp/core/error.h"

namespace imp::gguf {
namespace {

[[noreturn]] void wrong_type(std::string_view key, const Value& value, std::string_view wanted) {
  if (const Array* a = std::get_if<Array>(&value.data))
    fail(ErrorCode::bad_file, str("key ", key, " is an array of ", a->size(), " ", name(a->element),
                                  ", ", wanted, " is needed"));
  fail(ErrorCode::bad_file, str("key ", key, " is ", name(value.type), ", ", wanted, " is needed"));
}

template <class Out, class In>
Out converted(std::string_view key, In x) {
  if (!std::in_range<Out>(x))
    fail(ErrorCode::bad_file, str("key ", key, " is ", x, ", ", std::numeric_limits<Out>::min(),
                                  " to ", std::numeric_limits<Out>::max(), " is possible"));
  return static_cast<Out>(x);
}

template <class Out>
std::optional<std::vector<Out>> integer_array(const KeyValues& kv, std::string_view key) {
  const Value* value = kv.find(key);
  if (value == nullptr) return std::nullopt;
  const Array* a = std::get_if<Array>(&value->data);
  if (a == nullptr || a->element == ValueType::boolean)
    wrong_type(key, *value, "an array of integers");
  return std::visit(
      [&](const auto& v) -> std::vector<Out> {
        using T = typename std::decay_t<decltype(v)>::value_type;
        if constexpr (std::is_integral_v<T>) {
          std::vector<Out> out;
          out.reserve(v.size());
          for (const T x : v) {
            if constexpr (std::is_signed_v<T>)
              out.push_back(converted<Out>(key, static_cast<std::int64_t>(x)));
            else
              out.push_back(converted<Out>(key, static_cast<std::uint64_t>(x)));
          }
          return out;
        } else {
          wrong_type(key, *value, "an array of integers");
        }
      },
      a->data);
}

}  // namespace

std::string_view name(ValueType type) {
  switch (type) {
    case ValueType::u8:
      return "u8";
    case ValueType::i8:
      return "i8";
    case ValueType::u16:
      return "u16";
    case ValueType::i16:
      return "i16";
    case ValueType::u32:
      return "u32";
    case ValueType::i32:
      return "i32";
    case ValueType::f32:
      return "f32";
    case ValueType::boolean:
      return "bool";
    case ValueType::string:
      return "string";
    case ValueType::array:
      return "array";
    case ValueType::u64:
      return "u64";
    case ValueType::i64:
      return "i64";
    case ValueType::f64:
      return "f64";
  }
  return "unknown";
}

std::size_t Array::size() const {
  return std::visit([](const auto& v) { return v.size(); }, data);
}

const Value* KeyValues::find(std::string_view key) const {
  const auto at = map_.find(key);
  return at == map_.end() ? nullptr : &at->second;
}

std::optional<std::int64_t> KeyValues::integer(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (const auto* i = std::get_if<std::int64_t>(&value->data)) return *i;
  if (const auto* u = std::get_if<std::uint64_t>(&value->data))
    return converted<std::int64_t>(key, *u);
  wrong_type(key, *value, "an integer");
}

std::optional<double> KeyValues::number(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (const auto* d = std::get_if<double>(&value->data)) return *d;
  if (const auto* i = std::get_if<std::int64_t>(&value->data)) return static_cast<double>(*i);
  if (const auto* u = std::get_if<std::uint64_t>(&value->data)) return static_cast<double>(*u);
  wrong_type(key, *value, "a number");
}

std::optional<bool> KeyValues::boolean(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (const auto* b = std::get_if<bool>(&value->data)) return *b;
  wrong_type(key, *value, "a bool");
}

std::optional<std::string> KeyValues::string(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (const auto* s = std::get_if<std::string>(&value->data)) return *s;
  wrong_type(key, *value, "a string");
}

std::optional<std::vector<std::int64_t>> KeyValues::integers(std::string_view key) const {
  return integer_array<std::int64_t>(*this, key);
}

std::optional<std::vector<std::uint64_t>> KeyValues::unsigneds(std::string_view key) const {
  return integer_array<std::uint64_t>(*this, key);
}

std::optional<std::vector<bool>> KeyValues::booleans(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  const Array* a = std::get_if<Array>(&value->data);
  if (a == nullptr || a->element != ValueType::boolean) wrong_type(key, *value, "an array of bool");
  const auto& bytes = std::get<std::vector<std::uint8_t>>(a->data);
  return std::vector<bool>(bytes.begin(), bytes.end());
}

std::optional<std::vector<std::string>> KeyValues::strings(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (const Array* a = std::get_if<Array>(&value->data))
    if (const auto* v = std::get_if<std::vector<std::string>>(&a->data)) return *v;
  wrong_type(key, *value, "an array of strings");
}

std::int64_t KeyValues::need_integer(std::string_view key) const {
  if (const auto v = integer(key)) return *v;
  fail(ErrorCode::bad_file, str("key ", key, " is missing"));
}

double KeyValues::need_number(std::string_view key) const {
  if (const auto v = number(key)) return *v;
  fail(ErrorCode::bad_file, str("key ", key, " is missing"));
}

}  // namespace imp::gguf
