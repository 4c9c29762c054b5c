// build -> plan -> compile, once per shape.
#include "cpp/runtime/programs.h"

#include <algorithm>

namespace imp {

bool matches(std::string_view pattern, std::string_view text) {
  std::size_t p = 0, t = 0, star = std::string_view::npos, mark = 0;
  while (t < text.size()) {
    if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p, ++t;
    } else if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      mark = t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++mark;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

Program Programs::make(StepShape shape) const {
  auto graph = std::make_shared<Graph>();
  Builder builder(*graph, model_, state_, shape, planted_routing_);
  Program program;
  program.results = model_.arch().build(builder);
  if (program.results.logits) graph->keep(program.results.logits);
  if (shape.sample) {
    program.ids = graph->tensor(shape.outputs, 1, DType::i32);
    graph->add(Sample{program.results.logits, program.ids});
    graph->keep(program.ids);
  }
  for (std::size_t i = 0; i < graph->tensors().size(); ++i) {
    const TensorInfo& t = graph->tensors()[i];
    if (t.name.empty() ||
        std::ranges::none_of(patterns_, [&](const std::string& p) { return matches(p, t.name); }))
      continue;
    program.taps.push_back(
        {t.name, {static_cast<std::int32_t>(i)}, static_cast<std::size_t>(t.writer)});
  }
  Plan memory = plan(*graph);
  program.arena_bytes = memory.bytes;
  program.graph = graph;
  program.executable = backend_.compile(graph, std::move(memory), context_);
  return program;
}

Program& Programs::get(StepShape shape) {
  const auto it = std::ranges::find(programs_, shape, &std::pair<StepShape, Program>::first);
  if (it != programs_.end()) {
    programs_.splice(programs_.begin(), programs_, it);
  } else {
    programs_.emplace_front(shape, make(shape));
    ++compiled_;
    if (programs_.size() > most_kept) programs_.pop_back();
  }
  return programs_.front().second;
}

}  // namespace imp
