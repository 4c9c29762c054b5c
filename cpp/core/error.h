// The one error type: a code, a sentence that carries both numbers, and the place that noticed.
// C++20-clean.
#pragma once

#include <cstdint>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>

namespace imp {

enum class ErrorCode {
  invalid_argument,  // the caller asked for something that cannot be
  bad_file,          // a file is damaged or contradicts itself
  unsupported,       // well-formed, but not something imp runs
  out_of_memory,     // RAM, VRAM or disk is too small
  io,                // the operating system refused
  numeric,           // a result is not finite
  timeout,           // a device does not answer
  internal,          // a bug in imp
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, std::source_location where)
      : std::runtime_error(message), code_(code), where_(where) {}
  ErrorCode code() const { return code_; }
  const std::source_location& where() const { return where_; }

 private:
  ErrorCode code_;
  std::source_location where_;
};

[[noreturn]] inline void fail(ErrorCode code, const std::string& message,
                              std::source_location where = std::source_location::current()) {
  throw Error(code, message, where);
}

// Joins its arguments into one string: str("layer ", 3, " of ", 48).
template <class... Args>
std::string str(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

// An expected lack of something, as a value: which pool, what was asked for and what is left.
struct Shortage {
  std::string pool;
  std::int64_t needed = 0;
  std::int64_t available = 0;
  std::string message() const {
    return str(pool, ": ", needed, " needed, ", available, " available");
  }
};

}  // namespace imp
