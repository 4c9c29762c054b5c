// Block formats are split on upload: all codes of a row, then elsewhere all scales, both in whole
// words. NVFP4 also has its bits put where decoding is cheapest; the others' bytes stay the file's.
#include "cpp/quant/nvfp4.h"
#include "cpp/quant/q8_0.h"
#include "cuda/check.h"
#include "cuda/common/formats.cuh"
#include "cuda/common/math.cuh"
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

}  // namespace

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
