// One overload per op; each lives in the file named after the op's header, or after its part of it
// (rope, indexer). C++20-clean. The kernels are portable: the same code is compiled for sm_90a,
// where it is tested, and for sm_120a, where it has not run yet.
#pragma once

#include "cpp/ops/all.h"
#include "cuda/context.h"

namespace imp::cuda {

void run(const Feed&, const Context&);
void run(const EmbedStreams&, const Context&);
void run(const NgramRows&, const Context&);
void run(const GatherOutputs&, const Context&);
void run(const Linear&, const Context&);
void run(const SwiGlu&, const Context&);
void run(const GroupNorm&, const Context&);
void run(const ResidualMix&, const Context&);
void run(const ResidualInject&, const Context&);
void run(const ConvSilu&, const Context&);
void run(const DeltaRule&, const Context&);
void run(const GatedNorm&, const Context&);
void run(const RopeTable&, const Context&);
void run(const HeadNormRope&, const Context&);
void run(const KvStore&, const Context&);
void run(const IndexKeys&, const Context&);
void run(const IndexSelect&, const Context&);
void run(const Attend&, const Context&);
void run(const Route&, const Context&);
void run(const ExpertFfn&, const Context&);
void run(const Combine&, const Context&);
void run(const NgramGate&, const Context&);
void run(const NgramConv&, const Context&);
void run(const Linears&, const Context&);
void run(const LinearMix&, const Context&);
void run(const InjectNorm&, const Context&);
void run(const MoeFfn&, const Context&);
void run(const AttendInputs&, const Context&);
void run(const Sample&, const Context&);
void run(const GatedDeltaNet&, const Context&);
void run(const ResidualRead&, const Context&);

// How many warps share a group of a weight's rows.
int warps_per_row(const Matrix&);

// Device memory that an op needs while it runs. `rows` is the op's number of activation rows.
std::size_t scratch_bytes(const IndexSelect&, std::int64_t rows, std::int64_t context);
std::size_t scratch_bytes(const Attend&, std::int64_t rows);
std::size_t scratch_bytes(const ExpertFfn&, std::int64_t slots);
std::size_t scratch_bytes(const Sample&, std::int64_t rows, std::int64_t vocab);
std::size_t large_scratch_bytes(std::int64_t rows, bool cublas);  // of a linear map

}  // namespace imp::cuda
