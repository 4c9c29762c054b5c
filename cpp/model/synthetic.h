// Models of released shapes with random weights, made in memory: speeds and tests without a file.
#pragma once

#include <memory>
#include <string>

#include "cpp/model/model.h"

namespace imp {

// `spec`: a shape, and what differs from it, as in "flash-next" or
// "flash-next:layers=4,experts=64,vocab=32000,table=65536,seed=2" (table: rows of the n-gram table;
// released: 320001536, here 1048576 unless asked for); dense=q8_0 instead of bf16 for every matrix
// that is not a router or an expert.
//
// Without `on_host`, weights that a step may touch exist by their seed alone (Weight::seed), and a
// backend makes them where it keeps them; with it they are in host memory. With a `table_file` the
// n-gram table has the same bytes, but is mapped from that file, as a GGUF's is; a file that does
// not exist is written. Fails with invalid_argument for a spec that it cannot read or a file of
// other contents, out_of_memory with both numbers, io with the system's reason.
std::shared_ptr<const Model> make_synthetic(const std::string& spec, bool on_host,
                                            const std::string& table_file = "");

}  // namespace imp
