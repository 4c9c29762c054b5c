// Gated attention with partial rotation and grouped heads, and the block indexer that makes it
// sparse. C++20-clean.
#pragma once

#include "cpp/graph/tensor.h"

namespace imp {

// y[t] = [cos(p_t f_j), sin(p_t f_j)], f_j = theta^(-2j/dim), j < dim/2; y [T, dim]
struct RopeTable {
  std::int64_t dim;
  double theta;
  Tensor y;
  template <class R, class W>
  void visit(R, W writes) const {
    writes(y);
  }
};

// Per head: y = rope(x / rms(x) * w). x [T, heads * stride] (the first `dim` of each stride), y [T,
// heads * dim]
struct HeadNormRope {
  Tensor x, rope;
  Vector w;
  std::int64_t heads, dim, stride, rotary_dim;
  float eps;
  Tensor y;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(x);
    reads(rope);
    writes(y);
  }
};

// Writes keys and values into the cache of attention layer `layer`. k, v [T, kv_heads * dim];
// `done` orders readers.
struct KvStore {
  Tensor k, v;
  std::int64_t layer, width;  // width = kv_heads * dim
  Tensor done;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(k);
    reads(v);
    writes(done);
  }
};

// Block keys: for each block of `ratio` tokens that this step completes,
//   key = rope(mean(raw) / rms(mean) * w) at the position of its first token -> cache.
// raw [T, dim]; state: raw keys of the incomplete block, [ratio, dim], slot = position % ratio.
struct IndexKeys {
  Tensor raw;
  Vector w;
  std::int64_t layer, dim, ratio, rotary_dim;
  double theta;
  float eps;
  std::int64_t state;
  Tensor done;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(raw);
    writes(done);
  }
};

// The `blocks` best complete blocks for each token: score = sum_h relu(q_h . key_b), lower block
// index wins ties. q [T, heads * dim]; selected [T, blocks] int32 ascending, or -1 in column 0
// where all blocks are visible.
struct IndexSelect {
  Tensor q, keys;  // keys: IndexKeys::done
  std::int64_t layer, heads, dim, ratio, blocks;
  Tensor selected;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(q);
    reads(keys);
    writes(selected);
  }
};

// y_h = sigmoid(gate_h) * softmax(q_h K^T / sqrt(dim)) V over the visible tokens: all up to the
// token itself, or the selected blocks and the incomplete last one. q [T, heads * dim]; gate inside
// qg [T, heads * 2 dim], second half of each head; query head h reads KV head h / (heads /
// kv_heads).
struct Attend {
  Tensor q, qg, stored, selected;  // stored: KvStore::done; selected may be absent
  std::int64_t layer, heads, kv_heads, dim, ratio, blocks;
  Tensor y;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(q);
    reads(qg);
    reads(stored);
    if (selected) reads(selected);
    writes(y);
  }
};

// All that attention needs before it looks at keys, in one op: HeadNormRope of queries, keys and
// the indexer's queries, KvStore and IndexKeys. Without an indexer (index_heads 0) index_q,
// index_raw and what comes of them are absent.
struct AttendInputs {
  Tensor qg, k, v, index_q, index_raw;  // [T, heads * 2 dim], [T, kv_heads * dim] twice,
                                        // [T, index_heads * index_dim], [T, index_dim]
  Tensor rope;
  Vector q_norm, k_norm, index_q_norm, index_k_norm;
  std::int64_t layer, heads, kv_heads, dim, rotary_dim;
  std::int64_t index_heads, index_dim, ratio, state;
  double theta;
  float eps;
  Tensor q, normed_k, normed_index_q;  // normed_k: workspace
  Tensor stored, keys;
  template <class R, class W>
  void visit(R reads, W writes) const {
    for (const Tensor t : {qg, k, v, rope}) reads(t);
    for (const Tensor t : {q, normed_k, stored}) writes(t);
    if (index_heads == 0) return;
    for (const Tensor t : {index_q, index_raw}) reads(t);
    for (const Tensor t : {normed_index_q, keys}) writes(t);
  }
  HeadNormRope query_op() const {
    return {qg, rope, q_norm, heads, dim, 2 * dim, rotary_dim, eps, q};
  }
  HeadNormRope key_op() const {
    return {k, rope, k_norm, kv_heads, dim, dim, rotary_dim, eps, normed_k};
  }
  HeadNormRope index_query_op() const {
    return {index_q,   rope,       index_q_norm, index_heads,   index_dim,
            index_dim, rotary_dim, eps,          normed_index_q};
  }
  KvStore store_op() const { return {normed_k, v, layer, kv_heads * dim, stored}; }
  IndexKeys index_keys_op() const {
    return {index_raw, index_k_norm, layer, index_dim, ratio, rotary_dim, theta, eps, state, keys};
  }
};

}  // namespace imp
