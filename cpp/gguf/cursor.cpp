// Bounds checks of the GGUF reader and their sentences.
#include "cpp/gguf/cursor.h"

namespace imp::gguf {

std::string quote(std::string_view name) {
  constexpr std::size_t most = 96;  // bytes shown
  constexpr std::string_view hex = "0123456789abcdef";
  std::string out = "'";
  for (const char c : name.substr(0, most)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += "\\x";
      out += hex[byte >> 4];
      out += hex[byte & 15];
    }
  }
  if (name.size() > most) out += "...";
  return out + "'";
}

void Cursor::need(std::uint64_t count, std::size_t item_bytes) const {
  if (count > remaining() / item_bytes)
    bad(str("truncated: ", subject_, " needs ", count, item_bytes == 1 ? "" : " x ",
            item_bytes == 1 ? "" : str(item_bytes), " bytes at offset ", position_,
            ", the file has ", remaining(), " left"));
  const std::uint64_t bytes = count * item_bytes;
  if (position_ > limit_ || bytes > limit_ - position_)
    unsupported(str(subject_, " takes the metadata to ", position_ + bytes,
                    " bytes, imp reads up to ", limit_));
}

}  // namespace imp::gguf
