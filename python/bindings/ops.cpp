// _core.run_op: one op on one backend with given inputs, for tests that compare it with a
// reference.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>

#include "cpp/core/error.h"
#include "cpp/graph/graph.h"
#include "cpp/memory/cache_types.h"
#include "cpp/ops/step.h"
#include "cpp/runtime/backend.h"
#include "python/bindings/bindings.h"

namespace {

using namespace imp;
using FloatArray = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using IntArray = nb::ndarray<const std::int32_t, nb::c_contig, nb::device::cpu>;
using ByteArray = nb::ndarray<const std::uint8_t, nb::c_contig, nb::device::cpu>;
using StateArray = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using CacheArray = nb::ndarray<nb::c_contig, nb::device::cpu>;

// No conversion: a converted copy would not live long enough.
template <class T>
T array(nb::handle h) {
  return nb::cast<T>(h, false);
}

// A call under construction: named arguments from Python become tensors, weights and numbers of the
// op.
class Call {
 public:
  Call(nb::dict args, nb::dict step) : args_(std::move(args)) {
    if (step.contains("tokens")) step_.tokens = nb::cast<std::vector<std::int32_t>>(step["tokens"]);
    if (step.contains("positions"))
      step_.positions = nb::cast<std::vector<std::int32_t>>(step["positions"]);
    if (step.contains("outputs"))
      step_.outputs = nb::cast<std::vector<std::int32_t>>(step["outputs"]);
    if (step.contains("draws"))  // (temperature, top_k, top_p, min_p, uniform, suppressed ids)
      for (nb::handle h : step["draws"]) {
        const nb::tuple t = nb::cast<nb::tuple>(h);
        Draw& d = step_.draws.emplace_back();
        d.temperature = nb::cast<float>(t[0]);
        d.top_k = nb::cast<std::int32_t>(t[1]);
        d.top_p = nb::cast<float>(t[2]);
        d.log_min_p = std::log(nb::cast<float>(t[3]));
        d.uniform = nb::cast<double>(t[4]);
        const auto ids = nb::cast<std::vector<std::int32_t>>(t[5]);
        if (ids.size() > Draw::max_suppressed)
          fail(ErrorCode::invalid_argument,
               str(ids.size(), " suppressed tokens, a draw takes ", Draw::max_suppressed));
        std::ranges::copy(ids, d.suppressed);
      }
    if (step.contains("ngram_rows"))
      step_.ngram_rows = nb::cast<std::vector<std::vector<std::int32_t>>>(step["ngram_rows"]);
    if (step.contains("chunks"))  // (row, rows, position, state row, pages)
      for (nb::handle h : step["chunks"]) {
        const nb::tuple t = nb::cast<nb::tuple>(h);
        pages_.push_back(nb::cast<std::vector<std::int32_t>>(t[4]));
        step_.chunks.push_back({nb::cast<std::int64_t>(t[0]), nb::cast<std::int64_t>(t[1]),
                                nb::cast<std::int64_t>(t[2]), nb::cast<std::int64_t>(t[3]),
                                pages_.back().data()});
      }
    if (step.contains("state")) {  // float32 [rows, floats], changed in place
      const auto a = array<StateArray>(step["state"]);
      moved_.push_back({&memory_.state, a.data(), a.nbytes(), {}});
      memory_.state_stride = static_cast<std::int64_t>(a.shape(1));
    }
    if (step.contains("page_tokens"))
      memory_.page_tokens = nb::cast<std::int64_t>(step["page_tokens"]);
    if (step.contains("cache_types")) {  // names of the types of k and v
      const auto types = nb::cast<std::vector<std::string>>(step["cache_types"]);
      memory_.types = {cache_type(types.at(0)), cache_type(types.at(1))};
    }
    if (step.contains("kv"))  // one layer: (k, v, index or None), changed in place
      for (nb::handle h : step["kv"]) {
        const nb::tuple t = nb::cast<nb::tuple>(h);
        KvLayer& layer = layers_.emplace_back();
        const auto add = [this](void* at, nb::handle h) {
          const auto a = array<CacheArray>(h);
          moved_.push_back({at, a.data(), a.nbytes(), {}});
        };
        add(&layer.k, t[0]);
        add(&layer.v, t[1]);
        if (!t[2].is_none()) add(&layer.index, t[2]);
      }
  }

  std::int64_t integer(const char* n) const { return nb::cast<std::int64_t>(arg(n)); }
  float number(const char* n) const { return nb::cast<float>(arg(n)); }
  Act act(const char* n) const {
    const auto s = nb::cast<std::string>(arg(n));
    return s == "silu" ? Act::silu : s == "sigmoid" ? Act::sigmoid : Act::none;
  }
  Tensor in(const char* n) {
    if (nb::isinstance<IntArray>(arg(n))) {
      const auto a = array<IntArray>(arg(n));
      return feed(a.data(), a.shape(0), a.shape(1), DType::i32);
    }
    const auto a = array<FloatArray>(arg(n));
    return feed(a.data(), a.shape(0), a.shape(1), DType::f32);
  }
  Tensor out(const char* n, std::int64_t rows, std::int64_t cols, DType dtype = DType::f32) {
    const Tensor t = graph_->tensor(rows, cols, dtype);
    outputs_[n] = t;
    return t;
  }
  Tensor in_place(const char* n, Tensor base) {
    const Tensor t = graph_->alias(base);
    outputs_[n] = t;
    return t;
  }
  Tensor work(std::int64_t rows, std::int64_t cols) { return graph_->tensor(rows, cols); }
  Tensor token() { return feed(&nothing_, 1, 1, DType::f32); }
  std::int64_t rows(Tensor t) const { return graph_->info(t).rows; }
  std::int64_t cols(Tensor t) const { return graph_->info(t).cols; }
  Vector vector(const char* n) const {
    const auto a = array<FloatArray>(arg(n));
    return {a.data(), static_cast<std::int64_t>(a.size())};
  }
  // (type id, uint8 bytes, rows, cols, scale)
  const Weight* weight(const char* n) {
    const nb::tuple t = nb::cast<nb::tuple>(arg(n));
    const auto bytes = array<ByteArray>(t[1]);
    const auto dtype = static_cast<DType>(nb::cast<int>(t[0]));
    const auto cols = nb::cast<std::int64_t>(t[3]);
    weights_.push_back({dtype, nb::cast<std::int64_t>(t[2]), cols, row_bytes(dtype, cols),
                        reinterpret_cast<const std::byte*>(bytes.data()), nb::cast<float>(t[4])});
    return &weights_.back();
  }
  // (type id, uint8 bytes, experts, rows, cols, scales float32 [experts])
  const ExpertBank* bank(const char* n) {
    const nb::tuple t = nb::cast<nb::tuple>(arg(n));
    const auto bytes = array<ByteArray>(t[1]);
    const auto dtype = static_cast<DType>(nb::cast<int>(t[0]));
    const auto rows = nb::cast<std::int64_t>(t[3]), cols = nb::cast<std::int64_t>(t[4]);
    const std::size_t one = row_bytes(dtype, cols);
    banks_.push_back(
        {{dtype, rows, cols, one, reinterpret_cast<const std::byte*>(bytes.data()), 1.0f},
         nb::cast<std::int64_t>(t[2]),
         one * static_cast<std::size_t>(rows),
         array<FloatArray>(t[5]).data()});
    return &banks_.back();
  }
  const StepInputs& step() const { return step_; }

  nb::dict run(Op op, Backend& backend, std::int64_t context) {
    check_cache_types(memory_.types, backend.info());
    graph_->add(std::move(op));
    for (const auto& [name, t] : outputs_) graph_->keep(t);
    const auto executable = backend.compile(graph_, plan(*graph_), context);
    {
      nb::gil_scoped_release unlocked;
      for (Moved& m : moved_) {
        m.block = backend.alloc(m.bytes, "state of an op");
        backend.copy(m.block.get(), static_cast<const std::byte*>(m.host), m.bytes);
        std::byte* copy = m.block.get();
        std::memcpy(m.at, &copy, sizeof copy);
      }
      memory_.kv.assign(layers_.begin(), layers_.end());
      executable->run(step_, memory_, {});
      backend.sync();
      for (const Moved& m : moved_)
        backend.copy(static_cast<std::byte*>(m.host), m.block.get(), m.bytes);
    }
    nb::dict results;
    for (const auto& [name, t] : outputs_)
      results[name.c_str()] = copy(executable->data(t, 0, graph_->info(t).rows), graph_->info(t));
    return results;
  }

 private:
  nb::object arg(const char* n) const {
    if (!args_.contains(n)) fail(ErrorCode::invalid_argument, str("argument ", n, " is missing"));
    return args_[n];
  }
  Tensor feed(const void* data, std::size_t rows, std::size_t cols, DType dtype) {
    const Tensor t =
        graph_->tensor(static_cast<std::int64_t>(rows), static_cast<std::int64_t>(cols), dtype);
    graph_->add(Feed{data, t});
    return t;
  }
  static nb::object copy(const float* data, const imp::TensorInfo& t) {
    auto* values = new std::vector<float>(data, data + t.rows * t.cols);
    const nb::capsule owner(values,
                            [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
    const auto rows = static_cast<std::size_t>(t.rows), cols = static_cast<std::size_t>(t.cols);
    if (t.dtype == DType::i32)
      return nb::cast(
          nb::ndarray<nb::numpy, std::int32_t, nb::ndim<2>>(values->data(), {rows, cols}, owner));
    return nb::cast(
        nb::ndarray<nb::numpy, float, nb::ndim<2>>(values->data(), {rows, cols}, owner));
  }

  // Caller's memory that the backend works on a copy of.
  struct Moved {
    void* at;  // the pointer through which the step finds the copy
    void* host;
    std::size_t bytes;
    Block block;
  };

  nb::dict args_;
  StepInputs step_;
  StepMemory memory_;
  std::deque<KvLayer> layers_;
  std::vector<Moved> moved_;
  std::deque<std::vector<std::int32_t>> pages_;
  std::shared_ptr<Graph> graph_ = std::make_shared<Graph>();
  std::map<std::string, Tensor> outputs_;
  std::deque<Weight> weights_;
  std::deque<ExpertBank> banks_;
  float nothing_ = 0;
};

MoeFfn moe_ffn(Call& c, Tensor ids, Tensor weights) {
  MoeFfn op;
  op.x = c.in("x"), op.ids = ids, op.weights = weights;
  op.shared_gate = c.in("shared_gate"), op.shared_up = c.in("shared_up"), op.share = c.in("share");
  op.gate = c.bank("gate"), op.up = c.bank("up"), op.down = c.bank("down");
  op.shared_down = c.weight("shared_down");
  const std::int64_t rows = c.rows(op.x), slots = rows * c.cols(ids), hidden = op.down->expert.rows;
  op.hidden = c.work(slots, op.gate->expert.rows);
  op.up_out = c.work(slots, op.gate->expert.rows);
  op.slots = c.work(slots, hidden);
  op.shared_hidden = c.work(rows, c.cols(op.shared_gate));
  op.shared = c.work(rows, hidden);
  op.y = c.out("y", rows, hidden);
  return op;
}

using Make = Op (*)(Call&);

const std::map<std::string, Make>& makers() {
  static const std::map<std::string, Make> map = {
      {"embed_streams",
       [](Call& c) -> Op {
         const Weight* w = c.weight("table");
         const std::int64_t streams = c.integer("streams");
         return EmbedStreams{w, streams,
                             c.out("y", std::ssize(c.step().tokens), streams * w->cols)};
       }},
      {"ngram_rows",
       [](Call& c) -> Op {
         const Weight* w = c.weight("table");
         const std::int64_t heads = c.integer("heads");
         return NgramRows{w, heads, 0,
                          c.out("y", std::ssize(c.step().ngram_rows[0]) / heads, heads * w->cols)};
       }},
      {"gather_outputs",
       [](Call& c) -> Op {
         const Tensor x = c.in("x");
         return GatherOutputs{x, c.out("y", std::ssize(c.step().outputs), c.cols(x))};
       }},
      {"linear",
       [](Call& c) -> Op {
         const Tensor x = c.in("x");
         const Weight* w = c.weight("w");
         return Linear{x, w, c.out("y", c.rows(x), w->rows), c.number("alpha"), c.act("act")};
       }},
      {"linears",  // weights w0, w1, ... give y0, y1, ...
       [](Call& c) -> Op {
         Linears op{c.in("x"), {}};
         for (std::int64_t i = 0; i < c.integer("n"); ++i) {
           const std::string n = std::to_string(i);
           const Weight* w = c.weight(("w" + n).c_str());
           op.parts.push_back({w, c.out(("y" + n).c_str(), c.rows(op.x), w->rows),
                               c.number("alpha"), c.act("act")});
         }
         return op;
       }},
      {"linear_mix",
       [](Call& c) -> Op {
         const Tensor low = c.in("low"), n = c.in("n");
         const std::int64_t streams = c.integer("streams");
         return LinearMix{low,
                          n,
                          c.weight("w"),
                          streams,
                          c.work(c.rows(n), c.cols(n)),
                          c.out("x", c.rows(n), c.cols(n) / streams)};
       }},
      {"inject_norm",
       [](Call& c) -> Op {
         const Tensor r = c.in("r"), y = c.in("y"), s = c.in("s");
         return InjectNorm{r,
                           y,
                           s,
                           c.vector("w"),
                           c.number("eps"),
                           c.in_place("r", r),
                           c.out("n", c.rows(r), c.cols(r))};
       }},
      {"residual_read",
       [](Call& c) -> Op {
         ResidualRead op{c.in("r"), c.in("y"), c.in("s"), c.vector("w")};
         op.down = c.weight("down");
         op.inject = c.weight("inject");
         op.up = c.weight("up");
         op.streams = c.cols(op.s);
         op.eps = c.number("eps");
         const std::int64_t rows = c.rows(op.r), wide = c.cols(op.r);
         op.n = c.work(rows, wide);
         op.low = c.work(rows, op.down->rows);
         op.gate = c.work(rows, wide);
         op.out = c.in_place("r", op.r);
         op.next_s = c.out("s", rows, op.streams);
         op.x = c.out("x", rows, c.cols(op.y));
         return op;
       }},
      {"moe_ffn", [](Call& c) -> Op { return moe_ffn(c, c.in("ids"), c.in("weights")); }},
      {"routed_moe_ffn",
       [](Call& c) -> Op {
         const Tensor logits = c.in("logits");
         const std::int64_t rows = c.rows(logits), k = c.integer("k");
         MoeFfn op = moe_ffn(c, c.out("ids", rows, k, DType::i32), c.out("weights", rows, k));
         op.logits = logits;
         op.k = k;
         op.renormalise = c.integer("renormalise") != 0;
         return op;
       }},
      {"swiglu",
       [](Call& c) -> Op {
         const Tensor gate = c.in("gate"), up = c.in("up");
         return SwiGlu{gate, up, c.out("y", c.rows(gate), c.cols(gate))};
       }},
      {"group_norm",
       [](Call& c) -> Op {
         const Tensor x = c.in("x");
         return GroupNorm{x, c.vector("w"), c.integer("groups"), c.number("eps"),
                          c.out("y", c.rows(x), c.cols(x))};
       }},
      {"residual_mix",
       [](Call& c) -> Op {
         const Tensor n = c.in("n"), gate = c.in("gate");
         const std::int64_t streams = c.integer("streams");
         return ResidualMix{n, gate, streams, c.out("x", c.rows(n), c.cols(n) / streams)};
       }},
      {"residual_inject",
       [](Call& c) -> Op {
         const Tensor r = c.in("r"), y = c.in("y"), s = c.in("s");
         return ResidualInject{r, y, s, c.in_place("r", r)};
       }},
      {"conv_silu",
       [](Call& c) -> Op {
         const Tensor x = c.in("x");
         return ConvSilu{x, c.vector("w"), c.integer("kernel"), c.integer("state"),
                         c.out("y", c.rows(x), c.cols(x))};
       }},
      {"delta_rule",
       [](Call& c) -> Op {
         const Tensor qkv = c.in("qkv"), alpha = c.in("alpha"), b = c.in("b");
         const std::int64_t hv = c.integer("value_heads"), dv = c.integer("value_dim");
         return DeltaRule{qkv,
                          alpha,
                          b,
                          c.vector("a"),
                          c.vector("dt"),
                          c.integer("key_heads"),
                          hv,
                          c.integer("key_dim"),
                          dv,
                          c.integer("state"),
                          c.work(c.rows(qkv), 2 * hv),
                          c.out("o", c.rows(qkv), hv * dv)};
       }},
      {"gated_norm",
       [](Call& c) -> Op {
         const Tensor o = c.in("o"), z = c.in("z");
         return GatedNorm{o,
                          z,
                          c.vector("w"),
                          c.integer("dim"),
                          c.number("eps"),
                          c.act("act"),
                          c.out("y", c.rows(o), c.cols(o))};
       }},
      {"gated_delta_net",
       [](Call& c) -> Op {
         GatedDeltaNet op{c.in("x"), c.in("z"), c.in("alpha"), c.in("b")};
         op.conv = c.vector("conv");
         op.a = c.vector("a");
         op.dt = c.vector("dt");
         op.norm = c.vector("norm");
         op.kernel = c.integer("kernel");
         op.key_heads = c.integer("key_heads");
         op.value_heads = c.integer("value_heads");
         op.key_dim = c.integer("key_dim");
         op.value_dim = c.integer("value_dim");
         op.conv_state = c.integer("conv_state");
         op.delta_state = c.integer("delta_state");
         op.eps = c.number("eps");
         op.act = c.act("act");
         op.qkv = c.work(c.rows(op.x), c.cols(op.x));
         op.gates = c.work(c.rows(op.x), 2 * op.value_heads);
         op.o = c.work(c.rows(op.z), c.cols(op.z));
         op.y = c.out("y", c.rows(op.z), c.cols(op.z));
         return op;
       }},
      {"rope_table",
       [](Call& c) -> Op {
         const std::int64_t dim = c.integer("dim");
         return RopeTable{dim, c.number("theta"), c.out("y", std::ssize(c.step().positions), dim)};
       }},
      {"head_norm_rope",
       [](Call& c) -> Op {
         const Tensor x = c.in("x"), rope = c.in("rope");
         const std::int64_t heads = c.integer("heads"), dim = c.integer("dim");
         return HeadNormRope{x,
                             rope,
                             c.vector("w"),
                             heads,
                             dim,
                             c.integer("stride"),
                             c.integer("rotary_dim"),
                             c.number("eps"),
                             c.out("y", c.rows(x), heads * dim)};
       }},
      {"kv_store",
       [](Call& c) -> Op {
         const Tensor k = c.in("k"), v = c.in("v");
         return KvStore{k, v, 0, c.cols(k), c.out("done", 1, 1)};
       }},
      {"index_keys",
       [](Call& c) -> Op {
         const Tensor raw = c.in("raw");
         return IndexKeys{raw,
                          c.vector("w"),
                          0,
                          c.cols(raw),
                          c.integer("ratio"),
                          c.integer("rotary_dim"),
                          c.number("theta"),
                          c.number("eps"),
                          c.integer("state"),
                          c.out("done", 1, 1)};
       }},
      {"attend_inputs",
       [](Call& c) -> Op {
         AttendInputs o{c.in("qg"),      c.in("k"),         c.in("v"),
                        c.in("index_q"), c.in("index_raw"), c.in("rope")};
         o.q_norm = c.vector("q_norm");
         o.k_norm = c.vector("k_norm");
         o.index_q_norm = c.vector("index_q_norm");
         o.index_k_norm = c.vector("index_k_norm");
         o.layer = 0;
         o.heads = c.integer("heads");
         o.kv_heads = c.integer("kv_heads");
         o.dim = c.cols(o.k) / o.kv_heads;
         o.rotary_dim = c.integer("rotary_dim");
         o.index_dim = c.cols(o.index_raw);
         o.index_heads = c.cols(o.index_q) / o.index_dim;
         o.ratio = c.integer("ratio");
         o.state = c.integer("state");
         o.theta = c.number("theta");
         o.eps = c.number("eps");
         o.q = c.out("q", c.rows(o.k), o.heads * o.dim);
         o.normed_k = c.out("normed_k", c.rows(o.k), c.cols(o.k));
         o.normed_index_q = c.out("normed_index_q", c.rows(o.k), c.cols(o.index_q));
         o.stored = c.out("stored", 1, 1);
         o.keys = c.out("keys", 1, 1);
         return o;
       }},
      {"index_select",
       [](Call& c) -> Op {
         const Tensor q = c.in("q");
         const std::int64_t heads = c.integer("heads"), blocks = c.integer("blocks");
         return IndexSelect{q,
                            c.token(),
                            0,
                            heads,
                            c.cols(q) / heads,
                            c.integer("ratio"),
                            blocks,
                            c.out("selected", c.rows(q), blocks, DType::i32)};
       }},
      {"attend",
       [](Call& c) -> Op {
         const Tensor q = c.in("q"), qg = c.in("qg"), stored = c.token();
         const std::int64_t blocks = c.integer("blocks"), heads = c.integer("heads");
         const Tensor selected = blocks > 0 ? c.in("selected") : Tensor{};
         return Attend{q,
                       qg,
                       stored,
                       selected,
                       0,
                       heads,
                       c.integer("kv_heads"),
                       c.cols(q) / heads,
                       c.integer("ratio"),
                       blocks,
                       c.out("y", c.rows(q), c.cols(q))};
       }},
      {"route",
       [](Call& c) -> Op {
         const Tensor logits = c.in("logits");
         const std::int64_t k = c.integer("k");
         return Route{logits, k, c.integer("renormalise") != 0,
                      c.out("ids", c.rows(logits), k, DType::i32),
                      c.out("weights", c.rows(logits), k)};
       }},
      {"expert_ffn",
       [](Call& c) -> Op {
         const Tensor x = c.in("x"), ids = c.in("ids");
         const ExpertBank *gate = c.bank("gate"), *up = c.bank("up"), *down = c.bank("down");
         const std::int64_t slots = c.rows(ids) * c.cols(ids), ff = gate->expert.rows;
         return ExpertFfn{x,
                          ids,
                          gate,
                          up,
                          down,
                          c.work(slots, ff),
                          c.work(slots, ff),
                          c.out("y", slots, down->expert.rows)};
       }},
      {"combine",
       [](Call& c) -> Op {
         const Tensor slots = c.in("slots"), weights = c.in("weights"), shared = c.in("shared"),
                      gate = c.in("shared_gate");
         return Combine{slots, weights, shared, gate, c.out("y", c.rows(shared), c.cols(shared))};
       }},
      {"ngram_gate",
       [](Call& c) -> Op {
         const Tensor r = c.in("r"), key = c.in("key"), v = c.in("v");
         return NgramGate{r,
                          key,
                          v,
                          c.vector("w_key"),
                          c.vector("w_query"),
                          c.vector("w_conv"),
                          c.integer("streams"),
                          c.number("eps"),
                          c.out("value", c.rows(r), c.cols(r)),
                          c.out("n", c.rows(r), c.cols(r))};
       }},
      {"sample",
       [](Call& c) -> Op {
         const Tensor logits = c.in("logits");
         return Sample{logits, c.out("ids", c.rows(logits), 1, DType::i32)};
       }},
      {"ngram_conv",
       [](Call& c) -> Op {
         const Tensor r = c.in("r"), value = c.in("value"), n = c.in("n");
         return NgramConv{r,
                          value,
                          n,
                          c.vector("w"),
                          c.integer("kernel"),
                          c.integer("dilation"),
                          c.integer("state"),
                          c.in_place("r", r)};
       }},
  };
  return map;
}

}  // namespace

void bind_ops(nb::module_& m) {
  m.def(
      "run_op",
      [](const std::string& name, const nb::dict& args, const nb::dict& step,
         const std::string& backend_name, const std::string& kernels, int n_threads,
         std::int64_t context, bool batch_invariant, bool cublas_lt) {
        const auto it = makers().find(name);
        if (it == makers().end()) fail(ErrorCode::invalid_argument, str("no op is called ", name));
        Call call(args, step);
        if (backend_name != "cpu" && backend_name != "cuda")
          fail(ErrorCode::invalid_argument, str("backend '", backend_name, "': cpu or cuda"));
        CudaOptions cuda;
        cuda.batch_invariant = batch_invariant;
        cuda.cublas_lt = cublas_lt;
        const auto backend = backend_name == "cuda" ? make_cuda_backend(cuda)
                                                    : make_cpu_backend({n_threads, kernels});
        return call.run(it->second(call), *backend, context);
      },
      nb::arg("name"), nb::arg("args"), nb::arg("step"), nb::kw_only(), nb::arg("backend") = "cpu",
      nb::arg("kernels") = "auto", nb::arg("n_threads") = 2, nb::arg("context") = 65536,
      nb::arg("batch_invariant") = false, nb::arg("cublas_lt") = true,
      "Runs one op and returns its outputs by name. `args` holds its tensors (float32 or int32 "
      "[rows, cols]), weights and "
      "numbers; `step` the tokens, positions, chunks, state and cache, the last two changed in "
      "place.");
  m.def("op_names", [] {
    std::vector<std::string> names;
    for (const auto& [name, make] : makers()) names.push_back(name);
    return names;
  });
}
