// A step's inputs as one block: packed in pinned memory, copied to the device at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cpp/graph/graph.h"
#include "cuda/context.h"
#include "cuda/handles.h"
#include "cuda/watchdog.h"

namespace imp::cuda {

// Tables that stay on the host: token embeddings and n-gram tables. Without rows.
std::vector<TableRows> host_tables(const Graph&);

class StepBlock {
 public:
  // Waits until the block's last copy is done, packs and starts the copy. Device addresses depend
  // on the step's shape alone, until the block grows.
  void upload(const StepInputs&, const StepMemory&, const std::vector<TableRows>& tables,
              cudaStream_t, Watchdog&);

  const StepView& view() const { return view_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t chunks() const { return chunks_; }
  bool one_row_chunks() const { return one_row_chunks_; }
  std::span<const TableRows> tables() const { return tables_; }
  // Changes when the block moved: what was captured with the old addresses is void.
  int generation() const { return generation_; }

 private:
  void reserve(std::size_t bytes, cudaStream_t, Watchdog&);

  PinnedMemory host_;
  DeviceMemory device_;
  Event copied_;
  StepView view_;
  std::vector<TableRows> tables_;
  std::int64_t rows_ = 0, chunks_ = 0;
  bool one_row_chunks_ = false;
  int generation_ = 0;
};

}  // namespace imp::cuda
