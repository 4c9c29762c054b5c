// The CPU's inner loops as one table of functions, compiled once per instruction set (generic,
// AVX2, AVX-512) and chosen at start. Functions take raw pointers and sizes: no threads, no
// allocation, no standard containers (their inline code could be linked from a file compiled for a
// newer processor).
//
// Every dot product adds into 16 lanes (element k goes to lane k % 16, ascending) and folds the
// lanes by halves, whatever the instruction set, the batch size or the tile: a row's result never
// depends on its neighbours.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpp/core/half.h"
#include "cpp/ops/act.h"
#include "cpp/quant/quant.h"

namespace imp::cpu {

// y[t][n] = alpha * sum_k w[n][k] * x[t][k]
struct Gemm {
  DType type;          // of w
  const std::byte* w;  // row n starts at w + n * w_row_bytes
  std::size_t w_row_bytes;
  std::int64_t k;         // columns
  const float* const* x;  // [rows] pointers to [k]
  float* const* y;        // [rows] pointers to column 0 of an output row
  std::int64_t rows;
  float alpha;
};

// Consecutive tokens of one value head; strides in floats from token to token.
struct DeltaTokens {
  const float *q, *k, *v;  // [dk], [dk], [dv] of the first token; q and k already normalised
  std::int64_t qkv_stride;
  const float *decay, *beta;
  std::int64_t gate_stride;
  float* o;  // [dv]
  std::int64_t o_stride;
  std::int64_t tokens;  // at least 1
};

// Gathered keys and values of one KV head, as the cache stores them: f32, f16, bf16 or q8_0.
struct KeysValues {
  DType k_type, v_type;
  const std::byte* const* keys;    // [n] pointers to [dim]
  const std::byte* const* values;  // [n] pointers to [dim]
  std::int64_t n;
};

struct Kernels {
  const char* name;

  // Columns n0..n1 of y for all rows. scratch: gemm_scratch_floats(k) floats, 64-byte aligned.
  void (*gemm)(const Gemm&, std::int64_t n0, std::int64_t n1, float* scratch);
  // Decodes n elements (whole blocks) to fp32 and multiplies by scale.
  void (*decode)(DType type, const std::byte* src, std::int64_t n, float scale, float* dst);

  // --- elementwise, n floats each
  void (*activate)(Act act, const float* x, float* y,
                   std::int64_t n);  // y = act(x); in place allowed
  void (*silu_mul)(const float* gate, const float* up, float* y,
                   std::int64_t n);                                  // y = silu(gate) * up
  void (*axpy)(float a, const float* x, float* y, std::int64_t n);   // y += a * x
  void (*sigmoid_mul)(const float* gate, float* y, std::int64_t n);  // y *= sigmoid(gate)

  // --- norms. mean_square = sum x^2 / n
  void (*rms_norm)(const float* x, const float* w, float* y, std::int64_t n,
                   float eps);  // x / rms * w
  void (*l2_norm)(const float* x, float* y, std::int64_t n, float eps,
                  float scale);  // x * scale / |x|
  float (*dot)(const float* a, const float* b, std::int64_t n);

  // x[h] = 1/streams * sum_i sigmoid(gate[i][h]) * n[i][h]
  void (*residual_mix)(const float* n, const float* gate, float* x, std::int64_t streams,
                       std::int64_t hidden);
  // r[h] = sum_j rank order of w[j] * slots[j][h]  +  shared_weight * shared[h]
  void (*combine)(const float* const* slots, const float* w, std::int64_t n_slots,
                  const float* shared, float shared_weight, float* y, std::int64_t n);

  // Depthwise causal convolution of one row: y[c] = silu(sum_j w[j][c] * taps[j][c]); w is
  // [n_taps][channels].
  void (*conv_silu)(const float* const* taps, const float* w, std::int64_t n_taps, float* y,
                    std::int64_t channels);

  // Partial NeoX rotation of one head: pairs (j, j + half), cos/sin [half].
  void (*rope)(float* x, const float* cos, const float* sin, std::int64_t half);

  // The gated delta rule for one value head, state s [dk][dv], token by token:
  // s *= decay; u = beta * (v - s^T k); s += k u^T; o = s^T q
  void (*delta_rule)(const DeltaTokens&, float* s, std::int64_t dk, std::int64_t dv);

  // Attention of `heads` query heads that share one KV head over its n keys:
  // scores[h][i] = scale * q[h] . key[i]; softmax; out[h] = sum_i p[h][i] value[i].
  // q, out: [heads][dim] with the given strides (floats); scores: scratch of heads * round_up(n,
  // 16) floats.
  void (*attend)(const KeysValues& kv, const float* q, std::int64_t q_stride, std::int64_t heads,
                 std::int64_t dim, float scale, float* scores, float* out, std::int64_t out_stride);

  float (*max)(const float* x, std::int64_t n);
  // sum exp(x - max) in double
  double (*sum_exp)(const float* x, std::int64_t n, float max);
};

// gemm keeps the activations of a block of rows in the second cache (1 MB on the processors that it
// was measured on) and the stored weights that they multiply in the third.
inline constexpr std::int64_t gemm_block_bytes = 640 << 10, gemm_panel_bytes = 2 << 20;
// Columns are best split at multiples of this.
inline constexpr std::int64_t gemm_panel_rows = 16;
// No scratch is needed at present.
IMP_INLINE std::size_t gemm_scratch_floats(std::int64_t) { return 0; }

extern const Kernels generic_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

}  // namespace imp::cpu
