// Bounds checks of the GGUF reader and their sentences.
#include "cpp/gguf/cursor.h"

namespace imp::gguf {

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
