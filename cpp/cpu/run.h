// One overload per op; each lives in the file named after the op's header.
#pragma once

#include "cpp/cpu/context.h"
#include "cpp/ops/all.h"

namespace imp::cpu {

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

// fp32 words of workspace that one thread needs to run a node; `context` is the longest sequence in
// tokens.
std::size_t scratch_floats(const Graph&, const Op&, std::int64_t context);

}  // namespace imp::cpu
