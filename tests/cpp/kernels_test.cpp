// The other kernels of every instruction set against float64: elementwise, norms, convolution,
// rotation, the delta rule and attention. Tolerances are in units of 2^-24 of the stated scale.
#include <doctest/doctest.h>

#include <algorithm>

#include "tests/cpp/kernel_tables.h"

namespace imp::cpu {
namespace {

using Floats = std::vector<float>;

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// y[i] against want(i) within `ulps` of scale(i); true if all are near and the guard after n is
// untouched.
template <class Want, class Scale>
bool all_near(const Floats& y, std::int64_t n, Want want, Scale scale, double ulps) {
  for (std::int64_t i = 0; i < n; ++i)
    if (!near(y[static_cast<std::size_t>(i)], want(i), scale(i), ulps)) return false;
  for (std::size_t i = static_cast<std::size_t>(n); i < y.size(); ++i)
    if (!std::isnan(y[i])) return false;
  return true;
}

Floats guarded(std::int64_t n) { return Floats(static_cast<std::size_t>(n + 16), nan); }
Floats guarded(const Floats& x) {
  Floats y = x;
  y.resize(x.size() + 16, nan);
  return y;
}
double at(const Floats& x, std::int64_t i) {
  return static_cast<double>(x[static_cast<std::size_t>(i)]);
}

template <class F>
void each_table(F f) {
  for (const Kernels* k : tables())
    for (std::int64_t n : lengths) {
      CAPTURE(k->name);
      CAPTURE(n);
      f(*k, n);
    }
}

}  // namespace

TEST_CASE("activations and gates") {
  each_table([](const Kernels& k, std::int64_t n) {
    const Floats x = Random(1).floats(n, -30, 30), up = Random(2).floats(n);
    const auto silu = [&](std::int64_t i) { return at(x, i) * sigmoid(at(x, i)); };
    Floats y = guarded(n);
    k.activate(Act::silu, x.data(), y.data(), n);
    CHECK(all_near(y, n, silu, silu, 8));
    k.activate(Act::sigmoid, x.data(), y.data(), n);
    const auto gate = [&](std::int64_t i) { return sigmoid(at(x, i)); };
    CHECK(all_near(y, n, gate, gate, 8));
    k.activate(Act::none, x.data(), y.data(), n);
    CHECK(all_near(
        y, n, [&](std::int64_t i) { return at(x, i); }, silu, 0));
    y = guarded(x);
    k.activate(Act::silu, y.data(), y.data(), n);  // in place
    CHECK(all_near(y, n, silu, silu, 8));
    k.silu_mul(x.data(), up.data(), y.data(), n);
    const auto product = [&](std::int64_t i) { return silu(i) * at(up, i); };
    CHECK(all_near(y, n, product, product, 9));
    y = guarded(up);
    k.sigmoid_mul(x.data(), y.data(), n);
    const auto gated = [&](std::int64_t i) { return at(up, i) * gate(i); };
    CHECK(all_near(y, n, gated, gated, 9));
    y = guarded(up);
    k.axpy(0.7f, x.data(), y.data(), n);
    const auto sum = [&](std::int64_t i) {
      return at(up, i) + static_cast<double>(0.7f) * at(x, i);
    };
    CHECK(all_near(
        y, n, sum, [](std::int64_t) { return 32.0; }, 2));
  });
}

TEST_CASE("activations far out, infinite and NaN") {
  for (const Kernels* k : tables()) {
    CAPTURE(k->name);
    const Floats x = {-1e30f, -200, -88, 88, 200, 1e30f, 0, -0.0f, nan, HUGE_VALF};
    Floats y = guarded(10);
    k->activate(Act::sigmoid, x.data(), y.data(), 10);
    for (int i : {0, 1}) CHECK(std::abs(y[static_cast<std::size_t>(i)]) < 1e-37f);
    for (std::size_t i : {3, 4, 5, 9}) CHECK(y[i] == 1.0f);
    CHECK(y[6] == 0.5f);
    CHECK(y[7] == 0.5f);
    CHECK(std::isnan(y[8]));
    k->activate(Act::silu, x.data(), y.data(), 10);
    CHECK(y[5] == 1e30f);
    CHECK(std::abs(y[1]) < 1e-35f);
    CHECK(std::isnan(y[8]));
  }
}

TEST_CASE("norms and dot") {
  each_table([](const Kernels& k, std::int64_t n) {
    const Floats x = Random(3).floats(n, -3, 3), w = Random(4).floats(n);
    double squares = 0, dot = 0, magnitude = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      squares += at(x, i) * at(x, i);
      dot += at(x, i) * at(w, i);
      magnitude += std::abs(at(x, i) * at(w, i));
    }
    const double ulps = static_cast<double>(n) / 8 + 10;
    CHECK(near(k.dot(x.data(), w.data(), n), dot, magnitude, ulps));
    Floats y = guarded(n);
    k.rms_norm(x.data(), w.data(), y.data(), n, 1e-3f);
    const double rms = std::sqrt(squares / static_cast<double>(n) + static_cast<double>(1e-3f));
    const auto normed = [&](std::int64_t i) { return at(x, i) / rms * at(w, i); };
    CHECK(all_near(y, n, normed, normed, ulps));
    k.l2_norm(x.data(), y.data(), n, 1e-3f, 0.5f);
    const double length = std::sqrt(squares + static_cast<double>(1e-3f));
    const auto unit = [&](std::int64_t i) { return at(x, i) * 0.5 / length; };
    CHECK(all_near(y, n, unit, unit, ulps));
  });
}

TEST_CASE("residual mix, expert sum, convolution") {
  each_table([](const Kernels& k, std::int64_t n) {
    const auto one = [](std::int64_t) { return 1.0; };
    for (std::int64_t m : {1, 4, 10}) {
      const Floats a = Random(5).floats(m * n), g = Random(6).floats(m * n, -8, 8),
                   w = Random(7).floats(m), shared = Random(8).floats(n);
      std::vector<const float*> rows;
      for (std::int64_t j = 0; j < m; ++j) rows.push_back(a.data() + j * n);
      Floats y = guarded(n);
      k.residual_mix(a.data(), g.data(), y.data(), m, n);
      CHECK(all_near(
          y, n,
          [&](std::int64_t i) {
            double s = 0;
            for (std::int64_t j = 0; j < m; ++j) s += sigmoid(at(g, j * n + i)) * at(a, j * n + i);
            return s / static_cast<double>(m);
          },
          one, 12));
      k.combine(rows.data(), w.data(), m, shared.data(), 0.3f, y.data(), n);
      CHECK(all_near(
          y, n,
          [&](std::int64_t i) {
            double s = static_cast<double>(0.3f) * at(shared, i);
            for (std::int64_t j = 0; j < m; ++j) s += at(w, j) * at(a, j * n + i);
            return s;
          },
          one, 4.0 * static_cast<double>(m + 1)));
      k.conv_silu(rows.data(), g.data(), m, y.data(), n);
      CHECK(all_near(
          y, n,
          [&](std::int64_t i) {
            double s = 0;
            for (std::int64_t j = 0; j < m; ++j) s += at(g, j * n + i) * at(a, j * n + i);
            return s * sigmoid(s);
          },
          one, 64.0 * static_cast<double>(m)));
    }
  });
}

TEST_CASE("rope rotates pairs") {
  each_table([](const Kernels& k, std::int64_t half) {
    const Floats x = Random(9).floats(2 * half), angle = Random(10).floats(half, -3, 3);
    Floats c(angle), s(angle), y = guarded(x);
    for (float& f : c) f = std::cos(f);
    for (float& f : s) f = std::sin(f);
    k.rope(y.data(), c.data(), s.data(), half);
    CHECK(all_near(
        y, 2 * half,
        [&](std::int64_t i) {
          const std::int64_t j = i % half;
          return i < half ? at(x, j) * at(c, j) - at(x, half + j) * at(s, j)
                          : at(x, half + j) * at(c, j) + at(x, j) * at(s, j);
        },
        [](std::int64_t) { return 1.0; }, 4));
  });
}

TEST_CASE("max and sum of exponentials") {
  each_table([](const Kernels& k, std::int64_t n) {
    Floats x = Random(11).floats(n, -40, 5);
    for (std::int64_t at_max : {std::int64_t{0}, n / 2, n - 1}) {
      Floats v = x;
      v[static_cast<std::size_t>(at_max)] = 6;
      CHECK(k.max(v.data(), n) == 6.0f);
      double want = 0;
      for (float f : v) want += std::exp(static_cast<double>(f) - 6);
      CHECK(near(k.sum_exp(v.data(), n, 6), want, want, 70));
    }
    for (float& f : x) f = -HUGE_VALF;
    CHECK(k.max(x.data(), n) == -HUGE_VALF);
  });
}

// One token; strides do not matter.
DeltaTokens one_token(const float* q, const float* k, const float* v, const float* gates,
                      float* o) {
  return {q, k, v, 0, gates, gates + 1, 0, o, 0, 1};
}

TEST_CASE("several tokens at once are one token after the other, bit for bit") {
  constexpr std::int64_t dk = 17, dv = 83, tokens = 5, row = 2 * dk + dv;
  for (const Kernels* k : tables()) {
    CAPTURE(k->name);
    const Floats qkv = Random(3).floats(tokens * row), gates = Random(4).floats(2 * tokens);
    Floats a = Random(5).floats(dk * dv), b = a;
    Floats oa = guarded(tokens * dv), ob = guarded(tokens * dv);
    const float* p = qkv.data();
    k->delta_rule(
        {p, p + dk, p + 2 * dk, row, gates.data(), gates.data() + 1, 2, oa.data(), dv, tokens},
        a.data(), dk, dv);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* x = p + t * row;
      k->delta_rule(one_token(x, x + dk, x + 2 * dk, gates.data() + 2 * t, ob.data() + t * dv),
                    b.data(), dk, dv);
    }
    CHECK(a == b);
    CHECK(std::equal(oa.begin(), oa.begin() + tokens * dv, ob.begin()));
  }
}

TEST_CASE("delta_rule is the gated delta rule") {
  for (const Kernels* k : tables())
    for (std::int64_t dk : {1, 3, 17, 128})
      for (std::int64_t dv : {1, 15, 16, 17, 64, 83, 128}) {
        CAPTURE(k->name);
        CAPTURE(dk);
        CAPTURE(dv);
        const Floats q = Random(12).floats(dk), key = Random(13).floats(dk),
                     v = Random(14).floats(dv);
        const Floats before = Random(15).floats(dk * dv);
        Floats s = guarded(before), o = guarded(dv);
        const float gates[] = {0.9f, 0.4f};
        k->delta_rule(one_token(q.data(), key.data(), v.data(), gates, o.data()), s.data(), dk, dv);
        std::vector<double> want(static_cast<std::size_t>(dk * dv)),
            out(static_cast<std::size_t>(dv));
        for (std::int64_t j = 0; j < dv; ++j) {
          double predicted = 0;
          for (std::int64_t i = 0; i < dk; ++i)
            predicted += static_cast<double>(0.9f) * at(before, i * dv + j) * at(key, i);
          const double u = static_cast<double>(0.4f) * (at(v, j) - predicted);
          for (std::int64_t i = 0; i < dk; ++i) {
            double& w = want[static_cast<std::size_t>(i * dv + j)];
            w = static_cast<double>(0.9f) * at(before, i * dv + j) + at(key, i) * u;
            out[static_cast<std::size_t>(j)] += w * at(q, i);
          }
        }
        const double size = static_cast<double>(dk);
        const auto scale = [&](std::int64_t) { return size; };
        CHECK(all_near(
            s, dk * dv, [&](std::int64_t i) { return want[static_cast<std::size_t>(i)]; }, scale,
            16));
        CHECK(all_near(
            o, dv, [&](std::int64_t i) { return out[static_cast<std::size_t>(i)]; },
            [&](std::int64_t) { return size * size; }, 16));
      }
}

namespace {

const std::byte* bytes_of(const Floats& x) { return reinterpret_cast<const std::byte*>(x.data()); }

constexpr DType cache_formats[] = {DType::f32, DType::f16, DType::bf16, DType::q8_0};

// Rows of `dim` random values as a cache stores them, and what they decode to.
struct StoredRows {
  StoredRows(DType type, std::int64_t rows, std::int64_t dim, unsigned seed)
      : bytes(static_cast<std::size_t>(rows) * row_bytes(type, dim)),
        values(Random(seed).floats(rows * dim, -2, 2)),
        row(row_bytes(type, dim)) {
    for (std::int64_t i = 0; i < rows; ++i) {
      encode_row(type, values.data() + i * dim, dim, at(i));
      decode_row(type, at(i), dim, values.data() + i * dim);
    }
  }
  std::byte* at(std::int64_t i) { return bytes.data() + static_cast<std::size_t>(i) * row; }
  std::vector<std::byte> bytes;
  Floats values;
  std::size_t row;
};

void check_attend(const Kernels& k, DType k_type, DType v_type, std::int64_t dim, std::int64_t n,
                  std::int64_t heads) {
  const std::int64_t q_stride = dim + 3, out_stride = dim + 5;
  const Floats q = Random(16).floats(heads * q_stride, -2, 2);
  StoredRows k_rows(k_type, n, dim, 17), v_rows(v_type, n, dim, 18);
  std::vector<const std::byte*> keys, values;
  for (std::int64_t i = 0; i < n; ++i) {
    keys.push_back(k_rows.at(i));
    values.push_back(v_rows.at(n - 1 - i));  // not in order of their addresses
  }
  const KeysValues kv{k_type, v_type, keys.data(), values.data(), n};
  Floats scores(static_cast<std::size_t>(heads * ((n + 15) / 16 * 16)), nan);
  Floats out(static_cast<std::size_t>(heads * out_stride), nan);
  k.attend(kv, q.data(), q_stride, heads, dim, 0.3f, scores.data(), out.data(), out_stride);
  int bad = 0;
  for (std::int64_t h = 0; h < heads; ++h) {
    std::vector<double> p(static_cast<std::size_t>(n));
    double most = -1e300, total = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      double& s = p[static_cast<std::size_t>(i)];
      for (std::int64_t d = 0; d < dim; ++d)
        s += at(q, h * q_stride + d) * at(k_rows.values, i * dim + d);
      s *= static_cast<double>(0.3f);
      most = std::max(most, s);
    }
    for (double& s : p) total += s = std::exp(s - most);
    for (std::int64_t d = 0; d < dim; ++d) {
      double want = 0;
      for (std::int64_t i = 0; i < n; ++i)
        want += p[static_cast<std::size_t>(i)] / total * at(v_rows.values, (n - 1 - i) * dim + d);
      // Scores of up to dim * 1.2 carry an error of their own size into the exponent.
      const double ulps = 8.0 * static_cast<double>(dim) + static_cast<double>(n) + 40;
      bad += !near(out[static_cast<std::size_t>(h * out_stride + d)], want, 1, ulps);
    }
    for (std::int64_t d = dim; d < out_stride; ++d)
      bad += !std::isnan(out[static_cast<std::size_t>(h * out_stride + d)]);
    // The same head alone, bit for bit.
    Floats alone(static_cast<std::size_t>(dim), nan);
    k.attend(kv, q.data() + h * q_stride, q_stride, 1, dim, 0.3f, scores.data(), alone.data(), dim);
    bad += std::memcmp(alone.data(), out.data() + h * out_stride,
                       static_cast<std::size_t>(dim) * sizeof(float)) != 0;
  }
  CAPTURE(k.name);
  CAPTURE(type_info(k_type).name);
  CAPTURE(type_info(v_type).name);
  CAPTURE(dim);
  CAPTURE(n);
  CAPTURE(heads);
  CHECK(bad == 0);
}

}  // namespace

TEST_CASE("attend is softmax attention, each head by itself") {
  for (const Kernels* k : tables())
    for (std::int64_t dim : {1, 17, 64, 100, 256})
      for (std::int64_t n : {1, 2, 7, 8, 15, 16, 17, 100, 300})
        for (std::int64_t heads : {1, 2, 3, 5, 6, 7, 12})
          check_attend(*k, DType::f32, DType::f32, dim, n, heads);
}

TEST_CASE("attend reads every stored type") {
  for (const Kernels* k : tables())
    for (const DType k_type : cache_formats)
      for (const DType v_type : cache_formats)
        for (std::int64_t dim : {1, 32, 40, 96, 256}) {
          if (dim % 32 != 0 && (k_type == DType::q8_0 || v_type == DType::q8_0)) continue;
          for (std::int64_t n : {1, 5, 131})
            for (std::int64_t heads : {1, 4, 7}) check_attend(*k, k_type, v_type, dim, n, heads);
        }
}

TEST_CASE("attend takes scores beyond the range of exp") {
  for (const Kernels* k : tables()) {
    CAPTURE(k->name);
    const Floats q(32, 10.0f), low(32, 1.0f), high(32, 2.0f);  // scores 320 and 640
    const auto *a = bytes_of(low), *b = bytes_of(high);
    const std::byte* rows[] = {a, b, a, b};
    Floats scores(16, nan), out(32, nan);
    k->attend({DType::f32, DType::f32, rows, rows, 4}, q.data(), 32, 1, 32, 1.0f, scores.data(),
              out.data(), 32);
    for (float f : out) CHECK(f == 2.0f);
  }
}

TEST_CASE("the fused instruction sets agree bit for bit outside matrix products") {
  const auto all = tables();
  if (all.size() < 3) return;
  const Kernels &a = *all[1], &b = *all[2];
  for (std::int64_t n : lengths) {
    CAPTURE(n);
    const Floats x = Random(18).floats(4 * n, -20, 20), w = Random(19).floats(4 * n);
    const float* rows[] = {x.data(), x.data() + n, x.data() + 2 * n, x.data() + 3 * n};
    const auto both = [&](auto call) {
      Floats ya = guarded(w), yb = guarded(w);
      call(a, ya.data());
      call(b, yb.data());
      CHECK(std::memcmp(ya.data(), yb.data(), static_cast<std::size_t>(4 * n) * 4) == 0);
    };
    both([&](const Kernels& k, float* y) { k.activate(Act::silu, x.data(), y, n); });
    both([&](const Kernels& k, float* y) { k.silu_mul(x.data(), w.data(), y, n); });
    both([&](const Kernels& k, float* y) { k.sigmoid_mul(x.data(), y, n); });
    both([&](const Kernels& k, float* y) { k.rms_norm(x.data(), w.data(), y, n, 1e-6f); });
    both([&](const Kernels& k, float* y) { k.l2_norm(x.data(), y, n, 1e-6f, 1); });
    both([&](const Kernels& k, float* y) { k.residual_mix(w.data(), x.data(), y, 4, n); });
    both([&](const Kernels& k, float* y) { k.conv_silu(rows, w.data(), 4, y, n); });
    both([&](const Kernels& k, float* y) { k.rope(y, x.data(), x.data() + n, n); });
    both(
        [&](const Kernels& k, float* y) { y[0] = static_cast<float>(k.sum_exp(x.data(), n, 20)); });
    both([&](const Kernels& k, float* y) {
      const float gates[] = {0.5f, 0.5f};
      k.delta_rule(one_token(x.data(), x.data() + 2, x.data(), gates, y + 2 * n), y, 2, n);
    });
    for (const DType type : cache_formats) {
      if (n % type_info(type).block_elems != 0) continue;
      StoredRows stored(type, 4, n, 20);
      const std::byte* kv[] = {stored.at(0), stored.at(1), stored.at(2), stored.at(3)};
      both([&](const Kernels& k, float* y) {
        Floats scores(static_cast<std::size_t>(2 * 16), nan);
        k.attend({type, type, kv, kv + 1, 3}, w.data(), n, 2, n, 0.01f, scores.data(), y, n);
      });
    }
  }
}

}  // namespace imp::cpu
