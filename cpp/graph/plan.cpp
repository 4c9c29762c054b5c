// Arena planning: first fit by offset among the tensors that are alive, in order of birth.
#include <algorithm>
#include <limits>

#include "cpp/core/error.h"
#include "cpp/graph/graph.h"

namespace imp {
namespace {

constexpr std::size_t alignment = 64;

struct Live {
  std::size_t begin, end;
  std::int32_t last;
};

}  // namespace

Plan plan(const Graph& g) {
  const auto& tensors = g.tensors();
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (!tensors[i].base && tensors[i].writer >= 0) order.push_back(i);
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return tensors[i].writer; });

  Plan p;
  p.offsets.assign(tensors.size(), 0);
  std::vector<Live> live;  // ascending by begin
  for (const std::size_t i : order) {
    const TensorInfo& t = tensors[i];
    std::erase_if(live, [&](const Live& l) { return l.last < t.writer; });
    const std::size_t size = (t.bytes() + alignment - 1) / alignment * alignment;
    std::size_t at = 0;
    auto slot = live.begin();
    for (; slot != live.end(); ++slot) {
      if (at + size <= slot->begin) break;
      at = std::max(at, slot->end);
    }
    live.insert(std::ranges::upper_bound(live, at, {}, &Live::begin), {at, at + size, t.last});
    p.offsets[i] = at;
    p.bytes = std::max(p.bytes, at + size);
  }
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].base) p.offsets[i] = p.offsets[static_cast<std::size_t>(tensors[i].base.id)];
  return p;
}

std::string print(const Graph& g, const Plan& p) {
  std::string out;
  for (const Node& node : g.nodes()) {
    out += op_name(node.op);
    const auto show = [&](const char* arrow) {
      return [&, arrow](Tensor t) {
        const TensorInfo& x = g.info(t);
        out += str(arrow, t.id, x.name.empty() ? "" : ":" + x.name, "[", x.rows, ",", x.cols, "]@",
                   p.offsets[static_cast<std::size_t>(t.id)]);
      };
    };
    std::visit([&](const auto& o) { o.visit(show(" <-"), show(" ->")); }, node.op);
    out += "\n";
  }
  return out;
}

}  // namespace imp
