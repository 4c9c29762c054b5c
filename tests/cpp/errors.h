// Checks that a call fails with a code and a sentence that names all of `parts`.
#pragma once

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "cpp/core/error.h"

namespace imp::test {

template <class F>
void refused(F f, ErrorCode code, const std::vector<std::string>& parts) {
  try {
    f();
  } catch (const Error& e) {
    const std::string message = e.what();
    INFO(message);
    CHECK(static_cast<int>(e.code()) == static_cast<int>(code));
    for (const std::string& part : parts) {
      INFO(part);
      CHECK(message.find(part) != std::string::npos);
    }
    return;
  }
  std::string text;
  for (const std::string& part : parts) text += " " + part;
  FAIL_CHECK("not refused:" << text);
}

}  // namespace imp::test
