// Which rows of the n-gram table a token reads, from the token itself and the ones before it in its
// own sequence.
#pragma once

#include <cstdint>
#include <span>

#include "cpp/model/hparams.h"

namespace imp {

// rows[i * heads + h] for tokens history[first + i]; everything before history[0] counts as the
// boundary token. c_0 = the token, c_s = the s-th before it, or the boundary token from the first
// boundary (or the start) on; mix_n = c_0 m_0 ^ ... ^ c_{n-1} m_{n-1} (wrapping at 64 bits); row =
// mix_n mod vocab_h + offset_h.
void ngram_rows(const Ngram&, const NgramLayer&, std::span<const std::int32_t> history,
                std::size_t first, std::int32_t* rows);

}  // namespace imp
