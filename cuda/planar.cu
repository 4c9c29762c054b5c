// Block formats are split on upload: all codes of a row, then elsewhere all scales, both in whole
// words. NVFP4 also has its bits put where decoding is cheapest; the others' bytes stay the file's.
#include <algorithm>

#include "cpp/quant/nvfp4.h"
#include "cpp/quant/q8_0.h"
#include "cuda/check.h"
#include "cuda/common/formats.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/nvfp4_tiles.cuh"
#include "cuda/device.h"
#include "cuda/weights.h"

namespace imp::cuda {
namespace {

template <bool Pack, class Word>
__global__ void split_kernel(const Word* blocks, std::int64_t words, int block_words,
                             int scale_words, Word* codes, Word* scales) {
  const std::int64_t i = global_thread();
  if (i >= words) return;
  const std::int64_t block = i / block_words;
  const int at = static_cast<int>(i % block_words);
  Word word = blocks[i];
  if constexpr (Pack) word = at < scale_words ? Nvfp4::pack_scales(word) : Nvfp4::pack_codes(word);
  if (at < scale_words)
    scales[block * scale_words + at] = word;
  else
    codes[block * (block_words - scale_words) + at - scale_words] = word;
}

template <bool Pack, class Word>
void split(const BlockShape& shape, const std::byte* blocks, std::size_t n, std::byte* codes,
           std::byte* scales, cudaStream_t stream) {
  const auto words = static_cast<std::int64_t>(n * shape.block_bytes / sizeof(Word));
  if (words == 0) return;
  split_kernel<Pack><<<blocks_for(words), block_threads, 0, stream>>>(
      reinterpret_cast<const Word*>(blocks), words,
      static_cast<int>(shape.block_bytes / sizeof(Word)),
      static_cast<int>(shape.scale_bytes / sizeof(Word)), reinterpret_cast<Word*>(codes),
      reinterpret_cast<Word*>(scales));
  check_launch("split_blocks");
}

// Block `first + i` of a matrix with `row_blocks` a row, to its place in the tiles.
__global__ void tile_kernel(const std::uint32_t* blocks, std::int64_t first, std::int64_t n,
                            std::int64_t row_blocks, std::byte* codes, std::byte* scales) {
  using namespace nvfp4_tiles;
  const std::int64_t i = global_thread();
  if (i >= n) return;
  constexpr int words = nvfp4::block_bytes / 4, wide = cols / nvfp4::block_elems;
  const std::uint32_t* block = blocks + i * words;
  const std::int64_t row = (first + i) / row_blocks, at = (first + i) % row_blocks;
  const std::int64_t tile = row / rows * (row_blocks / wide) + at / wide;
  const std::int64_t part = row % rows * wide + at % wide;  // of the tile's blocks
  auto* to = reinterpret_cast<std::uint32_t*>(codes + tile * code_bytes + part * 32);
  std::uint32_t packed = 0;
  for (int group = 0; group < 4; ++group) {
    const std::uint32_t scale = block[0] >> (8 * group) & 0x7f;
    const bool zero = scale == 0 || scale == 0x7f;
    if (!zero) packed |= pack_scale(scale) << (8 * group);
    // Low nibbles of 8 bytes, then the high ones.
    std::uint32_t half[2] = {0, 0};
    for (int j = 0; j < 8; ++j) {
      const std::uint32_t byte = block[1 + 2 * group + j / 4] >> (8 * (j % 4));
      half[0] |= (byte & 15) << (4 * j);
      half[1] |= (byte >> 4 & 15) << (4 * j);
    }
    for (int h = 0; h < 2; ++h) to[2 * group + h] = zero ? 0 : pack_codes(half[h]);
  }
  reinterpret_cast<std::uint32_t*>(scales + tile * scale_bytes)[part] = packed;
}

}  // namespace

bool can_tile(const Weight& w) {
  return w.dtype == DType::nvfp4 && w.rows % nvfp4_tiles::cols == 0 &&
         w.cols % nvfp4_tiles::cols == 0 && std::max(w.rows, w.cols) <= most_tiled &&
         limits().code >= 90;
}

float tiled_missing() { return nvfp4_tiles::missing; }

void tile_blocks(const std::byte* blocks, std::size_t first, std::size_t n, std::int64_t row_blocks,
                 std::byte* codes, std::byte* scales, cudaStream_t stream) {
  if (n == 0) return;
  const auto count = static_cast<std::int64_t>(n);
  tile_kernel<<<blocks_for(count), block_threads, 0, stream>>>(
      reinterpret_cast<const std::uint32_t*>(blocks), static_cast<std::int64_t>(first), count,
      row_blocks, codes, scales);
  check_launch("tile_blocks");
}

BlockShape block_shape(DType type) {
  if (type == DType::nvfp4) return {nvfp4::block_bytes, 4, Nvfp4::missing};
  if (type == DType::q8_0) return {q8_0::block_bytes, 2};
  return {};
}

void split_blocks(DType type, const std::byte* blocks, std::size_t n, std::byte* codes,
                  std::byte* scales, cudaStream_t stream) {
  if (type == DType::nvfp4)
    split<true, std::uint32_t>(block_shape(type), blocks, n, codes, scales, stream);
  else
    split<false, std::uint16_t>(block_shape(type), blocks, n, codes, scales, stream);
}

}  // namespace imp::cuda
