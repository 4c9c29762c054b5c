// Matrix products of every instruction set: against float64, and bit for bit whatever the batch,
// the column split and the instruction set.
#include <doctest/doctest.h>

#include <string>

#include "tests/cpp/kernel_tables.h"

namespace imp::cpu {
namespace {

struct Matrix {
  Matrix(DType type, std::int64_t n, std::int64_t k, std::uint32_t seed)
      : type(type), n(n), k(k), row(row_bytes(type, k)), bytes(Random(seed).weights(type, n * k)) {
    values.resize(static_cast<std::size_t>(n * k));
    for (std::int64_t i = 0; i < n; ++i)
      decode_row(type, bytes.data() + static_cast<std::size_t>(i) * row, k, values.data() + i * k);
  }
  DType type;
  std::int64_t n, k;
  std::size_t row;
  std::vector<std::byte> bytes;
  std::vector<float> values;
};

// y [rows][n], NaN before the call; scratch too.
std::vector<float> product(const Kernels& kernels, const Matrix& w, const std::vector<float>& x,
                           std::int64_t first, std::int64_t rows, float alpha,
                           std::int64_t split = 0) {
  std::vector<float> y(static_cast<std::size_t>(rows * w.n), nan);
  std::vector<float> scratch(gemm_scratch_floats(w.k) + 16, nan);
  float* aligned = scratch.data();
  while (reinterpret_cast<std::uintptr_t>(aligned) % 64) ++aligned;
  std::vector<const float*> xs;
  std::vector<float*> ys;
  for (std::int64_t t = 0; t < rows; ++t) {
    xs.push_back(x.data() + (first + t) * w.k);
    ys.push_back(y.data() + t * w.n);
  }
  const Gemm g{w.type, w.bytes.data(), w.row, w.k, xs.data(), ys.data(), rows, alpha};
  if (split > 0) kernels.gemm(g, 0, split, aligned);
  if (split < w.n) kernels.gemm(g, split, w.n, aligned);
  return y;
}

bool same(const float* a, const float* b, std::int64_t n) {
  return std::memcmp(a, b, static_cast<std::size_t>(n) * sizeof(float)) == 0;
}

std::int64_t whole_blocks(DType type, std::int64_t k) {
  const std::int64_t block = type_info(type).block_elems;
  return (k + block - 1) / block * block;
}

}  // namespace

TEST_CASE("gemm equals float64 within the rounding of its sums") {
  for (const Kernels* kernels : tables())
    for (DType type : stored_types)
      for (std::int64_t k0 : lengths) {
        const std::int64_t k = whole_blocks(type, k0);
        for (std::int64_t n : {1, 2, 3, 4, 5, 7, 8, 9, 16, 17}) {
          const Matrix w(type, n, k, 3);
          for (std::int64_t rows : {1, 2, 3, 7}) {
            const std::vector<float> x = Random(4).floats(rows * k);
            const std::vector<float> y = product(*kernels, w, x, 0, rows, 0.75f);
            int bad = 0;
            for (std::int64_t t = 0; t < rows; ++t)
              for (std::int64_t i = 0; i < n; ++i) {
                double want = 0, magnitude = 0;
                for (std::int64_t j = 0; j < k; ++j) {
                  const double p =
                      static_cast<double>(w.values[static_cast<std::size_t>(i * k + j)]) *
                      static_cast<double>(x[static_cast<std::size_t>(t * k + j)]);
                  want += p;
                  magnitude += std::abs(p);
                }
                // A lane adds k / 16 products; every addition rounds once, twice without FMA.
                const double ulps = 2.0 * static_cast<double>(k) / 16 + 8;
                bad += !near(y[static_cast<std::size_t>(t * n + i)], 0.75 * want, magnitude, ulps);
              }
            CAPTURE(kernels->name);
            CAPTURE(type_info(type).name);
            CAPTURE(k);
            CAPTURE(n);
            CAPTURE(rows);
            CHECK(bad == 0);
          }
        }
      }
}

TEST_CASE("a row's product does not depend on the batch, the tile or the column split") {
  constexpr std::int64_t most = 129, n = 21;
  for (const Kernels* kernels : tables())
    for (DType type : stored_types)
      for (std::int64_t k : {64, 640, 10240}) {
        // The largest k crosses the blocks of rows early; a scalar table takes its time.
        if (k == 10240 && (kernels == &generic_kernels || type == DType::f8_e4m3)) continue;
        const Matrix w(type, n, k, 5);
        const std::vector<float> x = Random(6).floats(most * k);
        std::vector<float> single;
        for (std::int64_t t = 0; t < most; ++t) {
          const std::vector<float> y = product(*kernels, w, x, t, 1, 1.0f);
          single.insert(single.end(), y.begin(), y.end());
        }
        for (std::int64_t rows : {2, 3, 4, 5, 6, 7, 8, 11, 13, 64, 65, 129}) {
          CAPTURE(kernels->name);
          CAPTURE(type_info(type).name);
          CAPTURE(k);
          CAPTURE(rows);
          const std::int64_t first = most - rows;
          const std::vector<float> y = product(*kernels, w, x, first, rows, 1.0f, rows % n);
          CHECK(same(y.data(), single.data() + first * n, rows * n));
        }
      }
}

TEST_CASE("panels of weights and blocks of activations change nothing") {
  // More rows of w than a panel has, and more rows of x than a block.
  constexpr std::int64_t k = 8192, n = 2 * gemm_panel_bytes / (4 * k) + 3,
                         rows = 2 * gemm_block_bytes / (4 * k) + 3;
  const Matrix w(DType::f32, n, k, 12);
  const std::vector<float> x = Random(13).floats(rows * k);
  for (const Kernels* kernels : tables()) {
    CAPTURE(kernels->name);
    const std::vector<float> y = product(*kernels, w, x, 0, rows, 1.0f);
    for (std::int64_t t = 0; t < rows; ++t) {
      const std::vector<float> single = product(*kernels, w, x, t, 1, 1.0f);
      CHECK(same(y.data() + t * n, single.data(), n));
    }
  }
}

TEST_CASE("instruction sets agree bit for bit") {
  const auto all = tables();
  for (DType type : stored_types)
    for (std::int64_t k0 : lengths) {
      const std::int64_t k = whole_blocks(type, k0);
      const Matrix w(type, 9, k, 7);
      for (std::int64_t rows : {1, 2, 6, 13}) {
        const std::vector<float> x = Random(8).floats(rows * k);
        std::vector<float> decoded[3];
        for (std::size_t i = 0; i < all.size(); ++i) {
          decoded[i].assign(static_cast<std::size_t>(9 * k), nan);
          all[i]->decode(type, w.bytes.data(), 9 * k, 0.3f, decoded[i].data());
          CHECK(same(decoded[i].data(), decoded[0].data(), 9 * k));
        }
        // The generic table rounds products before it adds them, so only the fused ones compare.
        if (all.size() < 3) continue;
        CAPTURE(type_info(type).name);
        CAPTURE(k);
        CAPTURE(rows);
        const auto a = product(*all[1], w, x, 0, rows, 0.5f);
        const auto b = product(*all[2], w, x, 0, rows, 0.5f);
        CHECK(same(a.data(), b.data(), rows * 9));
      }
    }
}

TEST_CASE("a row of NaN or infinity stays alone") {
  for (const Kernels* kernels : tables()) {
    const Matrix w(DType::bf16, 5, 40, 9);
    std::vector<float> x = Random(10).floats(7 * 40);
    const auto clean = product(*kernels, w, x, 0, 7, 1.0f);
    for (std::size_t j = 0; j < 40; ++j) x[2 * 40 + j] = j % 2 ? nan : HUGE_VALF;
    const auto y = product(*kernels, w, x, 0, 7, 1.0f);
    CHECK(same(y.data(), clean.data(), 2 * 5));
    CHECK(std::isnan(y[2 * 5]));
    CHECK(same(y.data() + 3 * 5, clean.data() + 3 * 5, 4 * 5));
  }
}

TEST_CASE("no rows and no columns write nothing") {
  for (const Kernels* kernels : tables())
    for (DType type : stored_types) {
      const Matrix w(type, 4, 64, 11);
      const std::vector<float> x(64, 1.0f);
      std::vector<float> y(4, nan);
      const float* xs[] = {x.data()};
      float* ys[] = {y.data()};
      kernels->gemm({type, w.bytes.data(), w.row, 64, xs, ys, 0, 1.0f}, 0, 4, nullptr);
      kernels->gemm({type, w.bytes.data(), w.row, 64, xs, ys, 1, 1.0f}, 2, 2, nullptr);
      for (float f : y) CHECK(std::isnan(f));
    }
}

TEST_CASE("decode is exact for every code and scale") {
  for (const Kernels* kernels : tables()) {
    CAPTURE(kernels->name);
    int bad = 0;
    for (int scale = 0; scale < 256; ++scale) {  // the sign bit of a scale is ignored
      std::byte block[36];
      for (int s = 0; s < 4; ++s) block[s] = static_cast<std::byte>(s == 1 ? scale : 0x38);
      for (int i = 0; i < 32; ++i)
        block[4 + i] = static_cast<std::byte>((i % 8) | (15 - i % 8) << 4);
      float want[64], got[64];
      const int magnitude = scale & 0x7f, exponent = magnitude >> 3, mantissa = magnitude & 7;
      const double factor = magnitude == 0x7f ? 0.0
                            : exponent == 0   ? std::ldexp(mantissa, -9)
                                              : std::ldexp(8 + mantissa, exponent - 10);
      const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
      for (int i = 0; i < 64; ++i) {
        const int j = i % 8, code = i % 16 < 8 ? j : 15 - j;
        const double value = (code & 8 ? -1 : 1) * e2m1[code & 7];
        want[i] = static_cast<float>(value * (i / 16 == 1 ? factor : 1.0));
      }
      kernels->decode(DType::nvfp4, block, 64, 1.0f, got);
      for (int i = 0; i < 64; ++i) bad += std::memcmp(&got[i], &want[i], 4) != 0;
    }
    CHECK(bad == 0);
    for (int b = 0; b < 256; ++b) {
      const std::byte byte = static_cast<std::byte>(b);
      float got;
      kernels->decode(DType::f8_e4m3, &byte, 1, 1.0f, &got);
      const int exponent = (b >> 3) & 15, mantissa = b & 7;
      double want =
          exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
      if ((b & 0x7f) == 0x7f) want = nan;
      bad += !near(got, b & 0x80 ? -want : want, 0, 0);
    }
    for (std::uint32_t b = 0; b < 65536; ++b) {
      const auto h = static_cast<std::uint16_t>(b);
      std::byte halves[32];
      for (int i = 0; i < 16; ++i) std::memcpy(halves + 2 * i, &h, 2);
      float got[16];
      for (const std::int64_t n : {1, 16}) {  // the tail and the vector
        kernels->decode(DType::f16, halves, n, 1.0f, got);
        bad +=
            !near(got[n - 1], static_cast<double>(half_to_float(h)), 0, 0) && !std::isinf(got[0]);
        kernels->decode(DType::bf16, halves, n, 1.0f, got);
        const std::uint32_t bits = b << 16;
        bad += !std::isnan(got[n - 1]) && std::memcmp(&got[n - 1], &bits, 4) != 0;
      }
    }
    for (int q = -128; q < 128; ++q)
      for (float d : {0.0f, 0x1p-24f, 0x1.ffcp-3f, -65504.0f}) {
        std::byte block[34];
        const std::uint16_t h = float_to_half(d);
        std::memcpy(block, &h, 2);
        for (int i = 0; i < 32; ++i) block[2 + i] = static_cast<std::byte>(q);
        float got[32];
        kernels->decode(DType::q8_0, block, 32, 1.0f, got);
        for (float f : got) bad += static_cast<double>(f) != static_cast<double>(d) * q;
      }
    CHECK(bad == 0);
  }
}

}  // namespace imp::cpu
