// The one list of ops. A backend runs every one of them or does not compile. C++20-clean.
#pragma once

#include <string_view>
#include <variant>

#include "cpp/ops/attention.h"
#include "cpp/ops/embed.h"
#include "cpp/ops/linear.h"
#include "cpp/ops/moe.h"
#include "cpp/ops/ngram.h"
#include "cpp/ops/recurrent.h"
#include "cpp/ops/residual.h"
#include "cpp/ops/sample.h"

namespace imp {

using Op = std::variant<Feed, EmbedStreams, NgramRows, GatherOutputs, Linear, SwiGlu, GroupNorm,
                        ResidualMix, ResidualInject, ConvSilu, DeltaRule, GatedNorm, RopeTable,
                        HeadNormRope, KvStore, IndexKeys, IndexSelect, Attend, Route, ExpertFfn,
                        Combine, NgramGate, NgramConv, Linears, LinearMix, InjectNorm, MoeFfn,
                        AttendInputs, Sample, GatedDeltaNet, ResidualRead>;

std::string_view op_name(const Op& op);

}  // namespace imp
