// Layout: counts, per-row arrays, chunks, table rows, and last the pages, whose number varies.
#include "cuda/step_inputs.h"

#include <algorithm>
#include <cstring>

#include "cpp/core/error.h"
#include "cpp/model/synthetic_words.h"

namespace imp::cuda {
namespace {

constexpr std::size_t alignment = 16;

class Layout {
 public:
  std::size_t take(std::size_t bytes) {
    const std::size_t at = end_;
    end_ = (end_ + bytes + alignment - 1) / alignment * alignment;
    return at;
  }
  std::size_t end() const { return end_; }

 private:
  std::size_t end_ = 0;
};

std::int64_t covered_rows(const StepInputs& s) {
  return s.chunks.empty() ? 0 : s.chunks.back().row + s.chunks.back().rows;
}

std::int64_t page_count(const Chunk& c, std::int64_t page_tokens) {
  if (page_tokens == 0 || c.pages == nullptr) return 0;
  return (c.position + c.rows + page_tokens - 1) / page_tokens;
}

void copy_row(const Weight& w, std::int32_t row, std::byte* to) {
  const std::size_t at = static_cast<std::size_t>(row) * w.row_bytes;
  if (w.seed == 0)
    std::memcpy(to, w.data + at, w.row_bytes);
  else
    synthetic_words(w.dtype, w.seed, w.cols, at / 4, w.row_bytes / 4, to);
}

}  // namespace

std::vector<TableRows> host_tables(const Graph& g) {
  std::vector<TableRows> tables;
  for (const Node& node : g.nodes()) {
    if (const auto* tokens = std::get_if<EmbedStreams>(&node.op)) tables.push_back({tokens->table});
    if (const auto* ngrams = std::get_if<NgramRows>(&node.op))
      tables.push_back({ngrams->table, ngrams->index});
  }
  return tables;
}

const std::byte* Context::rows_of(const Weight* table, std::int64_t ngram_layer) const {
  for (const TableRows& t : tables)
    if (t.table == table && t.ngram_layer == ngram_layer) return t.data;
  fail(ErrorCode::internal, "a table's rows are not in the step");
}

void StepBlock::reserve(std::size_t bytes, cudaStream_t stream, Watchdog& watch) {
  if (bytes <= host_.size()) return;
  constexpr std::size_t least = std::size_t{1} << 16;
  const std::size_t size = std::max(least, bytes + bytes / 2);
  watch.wait(stream);
  host_ = {};
  device_ = {};
  host_ = pinned_memory(size, "step inputs");
  device_ = device_memory(size, "step inputs");
  ++generation_;
}

void StepBlock::upload(const StepInputs& s, const StepMemory& memory,
                       const std::vector<TableRows>& tables, cudaStream_t stream, Watchdog& watch) {
  const std::int64_t covered = covered_rows(s);
  rows_ = std::max(std::ssize(s.tokens), covered);
  const auto padding = static_cast<std::int32_t>(rows_ - covered);
  chunks_ = std::ssize(s.chunks);
  one_row_chunks_ = chunks_ == covered;
  Layout layout;
  const auto ints = [&](std::size_t n) { return layout.take(n * sizeof(std::int32_t)); };
  const std::size_t counts = ints(2), tokens = ints(s.tokens.size()),
                    positions = ints(s.positions.size()), outputs = ints(s.outputs.size()),
                    row_chunk = ints(static_cast<std::size_t>(rows_)),
                    chunks = layout.take(static_cast<std::size_t>(rows_) * sizeof(ChunkView)),
                    draws = layout.take(s.draws.size() * sizeof(Draw));
  const auto row_ids = [&s](const TableRows& t) -> const std::vector<std::int32_t>& {
    return t.ngram_layer == TableRows::by_token
               ? s.tokens
               : s.ngram_rows[static_cast<std::size_t>(t.ngram_layer)];
  };
  std::vector<std::size_t> table_at;
  for (const TableRows& t : tables)
    table_at.push_back(layout.take(row_ids(t).size() * t.table->row_bytes));
  std::size_t n_ids = 0;
  for (const auto& ids : s.expert_ids) n_ids += ids.size();
  const std::size_t expert_ids = ints(n_ids);
  const std::size_t pages = layout.end();
  std::int64_t n_pages = 0;
  for (const Chunk& c : s.chunks) n_pages += page_count(c, memory.page_tokens);
  const std::size_t bytes = pages + static_cast<std::size_t>(n_pages) * sizeof(std::int32_t);

  if (!copied_) copied_ = make_event();
  watch.wait(copied_.get());
  reserve(bytes, stream, watch);
  std::byte* h = host_.data();
  const auto put = [h]<class T>(std::size_t at, const std::vector<T>& v) {
    if (!v.empty()) std::memcpy(h + at, v.data(), v.size() * sizeof(T));
  };
  auto* count = reinterpret_cast<std::int32_t*>(h + counts);
  count[0] = static_cast<std::int32_t>(chunks_);
  count[1] = padding;
  put(tokens, s.tokens);
  put(positions, s.positions);
  put(outputs, s.outputs);
  put(draws, s.draws);
  std::size_t id_at = expert_ids;
  for (const auto& ids : s.expert_ids) {
    put(id_at, ids);
    id_at += ids.size() * sizeof(std::int32_t);
  }
  auto* row_chunks = reinterpret_cast<std::int32_t*>(h + row_chunk);
  auto* views = reinterpret_cast<ChunkView*>(h + chunks);
  auto* page = reinterpret_cast<std::int32_t*>(h + pages);
  std::int64_t first_page = 0;
  for (std::size_t i = 0; i < s.chunks.size(); ++i) {
    const Chunk& c = s.chunks[i];
    views[i] = {static_cast<std::int32_t>(c.row), static_cast<std::int32_t>(c.rows),
                static_cast<std::int32_t>(c.position), static_cast<std::int32_t>(c.state_row),
                static_cast<std::int32_t>(first_page)};
    std::fill_n(row_chunks + c.row, c.rows, static_cast<std::int32_t>(i));
    const std::int64_t n = page_count(c, memory.page_tokens);
    std::copy_n(c.pages, n, page + first_page);
    first_page += n;
  }
  ChunkView nobody{};
  nobody.row = static_cast<std::int32_t>(covered);
  std::fill(views + chunks_, views + rows_, nobody);
  std::fill_n(row_chunks + covered, padding, static_cast<std::int32_t>(chunks_));
  tables_ = tables;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    tables_[i].data = device_.data() + table_at[i];
    const Weight& w = *tables[i].table;
    std::byte* to = h + table_at[i];
    for (const std::int32_t row : row_ids(tables[i])) {
      copy_row(w, row, to);
      to += w.row_bytes;
    }
  }
  check(cudaMemcpyAsync(device_.data(), h, bytes, cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
  check(cudaEventRecord(copied_.get(), stream), "cudaEventRecord");

  const auto at = [&](std::size_t offset) {
    return reinterpret_cast<const std::int32_t*>(device_.data() + offset);
  };
  view_ = {at(counts),
           at(counts) + 1,
           reinterpret_cast<const ChunkView*>(device_.data() + chunks),
           at(row_chunk),
           at(tokens),
           at(positions),
           at(outputs),
           at(pages),
           at(expert_ids),
           reinterpret_cast<const Draw*>(device_.data() + draws),
           memory.state,
           memory.state_stride,
           memory.page_tokens};
}

}  // namespace imp::cuda
