// Attention over the paged cache, dense or restricted to the indexer's blocks. Every token is
// computed by itself, so its result depends neither on chunk boundaries nor on its neighbours.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpp/cpu/run.h"

namespace imp::cpu {
namespace {

// cos and sin of position * theta^(-2j/dim), [dim/2] each; fp32 like the models were trained with.
void rotation(std::int64_t position, std::int64_t dim, double theta, float* cos, float* sin) {
  for (std::int64_t j = 0; j < dim / 2; ++j) {
    const float exponent = static_cast<float>(2 * j) / static_cast<float>(dim);
    const float frequency =
        1.0f / static_cast<float>(std::pow(theta, static_cast<double>(exponent)));
    const float angle = static_cast<float>(position) * frequency;
    cos[j] = std::cos(angle);
    sin[j] = std::sin(angle);
  }
}

std::int64_t page_of(const Chunk& chunk, std::int64_t position, std::int64_t page_tokens) {
  return chunk.pages[position / page_tokens];
}

// Where the cache holds a position, in tokens.
std::size_t slot_of(const Chunk& chunk, std::int64_t position, std::int64_t page_tokens) {
  return static_cast<std::size_t>(page_of(chunk, position, page_tokens) * page_tokens +
                                  position % page_tokens);
}

std::int64_t block_dim_padded(std::int64_t n) { return (n + 15) / 16 * 16; }

}  // namespace

void run(const RopeTable& op, const Context& c) {
  c.over_rows(c.rows(op.y), op.dim * 8, [&](std::int64_t t0, std::int64_t t1, int) {
    for (std::int64_t t = t0; t < t1; ++t)
      rotation(c.step.positions[static_cast<std::size_t>(t)], op.dim, op.theta, c.row(op.y, t),
               c.row(op.y, t) + op.dim / 2);
  });
}

void run(const HeadNormRope& op, const Context& c) {
  const std::int64_t half = op.rotary_dim / 2;
  c.over_rows(c.rows(op.y), c.cols(op.y), [&](std::int64_t t0, std::int64_t t1, int) {
    for (std::int64_t t = t0; t < t1; ++t) {
      const float* table = c.row(op.rope, t);
      for (std::int64_t h = 0; h < op.heads; ++h) {
        float* y = c.row(op.y, t) + h * op.dim;
        c.k.rms_norm(c.row(op.x, t) + h * op.stride, op.w.data, y, op.dim, op.eps);
        c.k.rope(y, table, table + half, half);
      }
    }
  });
}

void run(const KvStore& op, const Context& c) {
  const KvLayer& kv = c.memory.kv[static_cast<std::size_t>(op.layer)];
  const CacheTypes types = c.memory.types;
  const std::size_t k_bytes = row_bytes(types.k, op.width), v_bytes = row_bytes(types.v, op.width);
  c.over_rows(c.rows(op.k), 2 * op.width, [&](std::int64_t t0, std::int64_t t1, int) {
    for (std::int64_t t = t0; t < t1; ++t) {
      const Chunk& chunk = c.step.chunk_of(t);
      const std::size_t at = slot_of(chunk, chunk.position + t - chunk.row, c.memory.page_tokens);
      encode_row(types.k, c.row(op.k, t), op.width, kv.k + at * k_bytes);
      encode_row(types.v, c.row(op.v, t), op.width, kv.v + at * v_bytes);
    }
  });
}

void run(const IndexKeys& op, const Context& c) {
  const KvLayer& kv = c.memory.kv[static_cast<std::size_t>(op.layer)];
  const std::int64_t page_tokens = c.memory.page_tokens, half = op.rotary_dim / 2;
  const auto bytes = static_cast<std::size_t>(op.dim) * sizeof(float);
  c.pool.parallel_for(static_cast<std::int64_t>(c.step.chunks.size()), [&](std::int64_t task,
                                                                           int thread) {
    const Chunk& chunk = c.step.chunks[static_cast<std::size_t>(task)];
    float* tail = c.memory.state_at(chunk, op.state);
    float* cos = c.scratch(thread);
    for (std::int64_t i = 0; i < chunk.rows; ++i) {
      const std::int64_t p = chunk.position + i;
      std::memcpy(tail + p % op.ratio * op.dim, c.row(op.raw, chunk.row + i), bytes);
      if ((p + 1) % op.ratio != 0) continue;
      const std::int64_t first = p + 1 - op.ratio;
      float* key = kv.index + (page_of(chunk, p, page_tokens) * page_tokens + first % page_tokens) /
                                  op.ratio * op.dim;
      std::memset(key, 0, bytes);
      for (std::int64_t r = 0; r < op.ratio; ++r) c.k.axpy(1, tail + r * op.dim, key, op.dim);
      for (std::int64_t d = 0; d < op.dim; ++d) key[d] /= static_cast<float>(op.ratio);
      c.k.rms_norm(key, op.w.data, key, op.dim, op.eps);
      rotation(first, op.rotary_dim, op.theta, cos, cos + half);
      c.k.rope(key, cos, cos + half, half);
    }
  });
}

void run(const AttendInputs& op, const Context& c) {
  run(op.query_op(), c);
  run(op.key_op(), c);
  run(op.store_op(), c);
  if (op.index_heads == 0) return;
  run(op.index_query_op(), c);
  run(op.index_keys_op(), c);
}

void run(const IndexSelect& op, const Context& c) {
  const KvLayer& kv = c.memory.kv[static_cast<std::size_t>(op.layer)];
  const std::int64_t page_tokens = c.memory.page_tokens, page_blocks = page_tokens / op.ratio;
  c.pool.parallel_for(c.rows(op.q), [&](std::int64_t t, int thread) {
    const Chunk& chunk = c.step.chunk_of(t);
    const std::int64_t visible = chunk.position + (t - chunk.row) + 1, blocks = visible / op.ratio;
    std::int32_t* selected = c.i32(op.selected) + t * op.blocks;
    if (blocks <= op.blocks) {
      selected[0] = -1;
      return;
    }
    float* score = c.scratch(thread);
    auto* order = reinterpret_cast<std::int32_t*>(score + block_dim_padded(blocks));
    for (std::int64_t b = 0; b < blocks; ++b) {
      const float* key =
          kv.index + (chunk.pages[b / page_blocks] * page_blocks + b % page_blocks) * op.dim;
      float sum = 0;
      for (std::int64_t h = 0; h < op.heads; ++h)
        sum += std::max(0.0f, c.k.dot(c.row(op.q, t) + h * op.dim, key, op.dim));
      score[b] = sum;
      order[b] = static_cast<std::int32_t>(b);
    }
    std::nth_element(order, order + op.blocks, order + blocks, [&](std::int32_t a, std::int32_t b) {
      return score[a] != score[b] ? score[a] > score[b] : a < b;
    });
    std::copy_n(order, op.blocks, selected);
    std::sort(selected, selected + op.blocks);
  });
}

void run(const Attend& op, const Context& c) {
  const KvLayer& kv = c.memory.kv[static_cast<std::size_t>(op.layer)];
  const std::int64_t page_tokens = c.memory.page_tokens, group = op.heads / op.kv_heads;
  const CacheTypes types = c.memory.types;
  const std::size_t k_bytes = row_bytes(types.k, op.dim), v_bytes = row_bytes(types.v, op.dim);
  const float scale = 1 / std::sqrt(static_cast<float>(op.dim));
  c.pool.parallel_for(c.rows(op.q) * op.kv_heads, [&](std::int64_t task, int thread) {
    const std::int64_t t = task / op.kv_heads, head = task % op.kv_heads;
    const Chunk& chunk = c.step.chunk_of(t);
    const std::int64_t visible = chunk.position + (t - chunk.row) + 1;
    const std::int32_t* selected = op.selected ? c.i32(op.selected) + t * op.blocks : nullptr;
    const bool sparse = selected != nullptr && selected[0] >= 0;
    const std::int64_t most = sparse ? (op.blocks + 1) * op.ratio : visible;

    auto** keys = reinterpret_cast<const std::byte**>(c.scratch(thread));
    const std::byte** values = keys + most;
    auto* scores = reinterpret_cast<float*>(values + most);
    std::int64_t n = 0;
    const auto take = [&](std::int64_t first, std::int64_t end) {
      for (std::int64_t p = first; p < end; ++p, ++n) {
        const std::size_t at =
            slot_of(chunk, p, page_tokens) * static_cast<std::size_t>(op.kv_heads) +
            static_cast<std::size_t>(head);
        keys[n] = kv.k + at * k_bytes;
        values[n] = kv.v + at * v_bytes;
      }
    };
    if (sparse) {
      for (std::int64_t b = 0; b < op.blocks; ++b)
        take(selected[b] * op.ratio, (selected[b] + 1) * op.ratio);
      take(visible / op.ratio * op.ratio, visible);
    } else {
      take(0, visible);
    }
    const std::int64_t first = head * group;
    float* y = c.row(op.y, t) + first * op.dim;
    c.k.attend({types.k, types.v, keys, values, n}, c.row(op.q, t) + first * op.dim, op.dim, group,
               op.dim, scale, scores, y, op.dim);
    for (std::int64_t h = 0; h < group; ++h)
      c.k.sigmoid_mul(c.row(op.qg, t) + (2 * (first + h) + 1) * op.dim, y + h * op.dim, op.dim);
  });
}

}  // namespace imp::cpu
