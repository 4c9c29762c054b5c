// libFuzzer: whatever the bytes are, the reader answers with a Gguf that lies inside them or with
// an Error.
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "cpp/core/error.h"
#include "cpp/gguf/gguf.h"

namespace {

using imp::gguf::Gguf;
using imp::gguf::KeyValues;

void look_up(const KeyValues& kv, const std::string& key) {
  const auto attempt = [](auto look) {
    try {
      look();
    } catch (const imp::Error&) {
    }
  };
  attempt([&] { kv.integer(key); });
  attempt([&] { kv.number(key); });
  attempt([&] { kv.boolean(key); });
  attempt([&] { kv.string(key); });
  attempt([&] { kv.integers(key); });
  attempt([&] { kv.unsigneds(key); });
  attempt([&] { kv.booleans(key); });
  attempt([&] { kv.strings(key); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  try {
    const auto g = Gguf::parse(bytes, "fuzz.gguf");
    for (const auto& [key, value] : g->keys().map()) look_up(g->keys(), key);
    for (const imp::gguf::TensorInfo& t : g->tensors()) {
      if (t.data < bytes.data() || t.n_bytes > size || t.file_offset > size - t.n_bytes ||
          t.data != bytes.data() + t.file_offset || g->find(t.name) != &t)
        std::abort();
      if (!imp::type_info(t.dtype).computes) continue;
      std::vector<float> row(static_cast<std::size_t>(t.dims[0]));
      const std::size_t row_bytes = imp::row_bytes(t.dtype, t.dims[0]);
      imp::decode_row(t.dtype, t.data, t.dims[0], row.data());
      imp::decode_row(t.dtype, t.data + t.n_bytes - row_bytes, t.dims[0], row.data());
    }
  } catch (const imp::Error&) {
  }
  return 0;
}
