// _core.Session: steps over sequences, with the GIL released while they run.
#include "cpp/runtime/session.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <span>
#include <variant>

#include "cpp/core/error.h"
#include "cpp/memory/cache_types.h"
#include "cpp/runtime/planted_routing.h"
#include "cpp/runtime/score.h"
#include "python/bindings/bindings.h"

namespace {

using Tokens = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using LogitsArray = nb::ndarray<nb::numpy, const float, nb::ndim<2>, nb::c_contig>;
using LogitsRow = nb::ndarray<nb::numpy, const float, nb::ndim<1>, nb::c_contig>;
using Requests = std::vector<std::tuple<std::int64_t, Tokens, std::int64_t>>;

std::vector<imp::StepRequest> step_requests(const Requests& requests) {
  std::vector<imp::StepRequest> step;
  for (const auto& [seq, tokens, first] : requests)
    step.push_back({seq, {tokens.data(), tokens.shape(0)}, first});
  return step;
}

nb::capsule owner(std::shared_ptr<const void> memory) {
  using Memory = std::shared_ptr<const void>;
  return nb::capsule(new Memory(std::move(memory)),
                     [](void* p) noexcept { delete static_cast<Memory*>(p); });
}

// Values for shortages inside the runtime, exceptions at the edge.
template <class T>
T unwrap(std::expected<T, imp::Shortage>&& r) {
  if (!r) imp::fail(imp::ErrorCode::out_of_memory, r.error().message());
  return std::move(*r);
}

// Made with the model, so that its sessions can share what is on the device.
struct DeviceWeights {
  std::shared_ptr<imp::CudaWeights> handle = imp::make_cuda_weights();
};

// Lets one thread in at a time; a second one gets an error, not a race.
class PySession {
 public:
  PySession(std::shared_ptr<imp::Model> model, const imp::SessionOptions& options,
            std::shared_ptr<imp::Backend> backend)
      : session_(std::make_unique<imp::Session>(std::move(model), std::move(backend), options)) {}

  template <class F>
  auto use(F f) {
    if (busy_.exchange(true))
      imp::fail(imp::ErrorCode::invalid_argument, "this session is busy in another thread");
    struct Done {
      std::atomic<bool>& busy;
      ~Done() { busy = false; }
    } done{busy_};
    if (!session_) imp::fail(imp::ErrorCode::invalid_argument, "this session is closed");
    return f(*session_);
  }
  void close() {
    use([this](imp::Session&) { session_.reset(); });
  }

 private:
  std::unique_ptr<imp::Session> session_;
  std::atomic<bool> busy_{false};
};

using RoutingIds = nb::ndarray<const std::uint16_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// Who chooses experts: "model" (nobody else), a hit curve by name, or recorded ids.
decltype(imp::SessionOptions::routing) routed_by(const imp::HParams& h, const std::string& name,
                                                 const std::optional<RoutingIds>& ids) {
  if (ids) {
    if (static_cast<std::int64_t>(ids->shape(1)) != h.layers ||
        static_cast<std::int64_t>(ids->shape(2)) != h.moe.used)
      imp::fail(imp::ErrorCode::invalid_argument,
                imp::str("recorded routing of ", ids->shape(1), " layers, ", ids->shape(2),
                         " experts a token; the model has ", h.layers, " and ", h.moe.used));
    auto recorded = std::make_shared<imp::RecordedRouting>(
        std::vector<std::uint16_t>(ids->data(), ids->data() + ids->size()), h.layers, h.moe.used);
    return [recorded](std::int64_t layer, std::int64_t rows, std::int32_t* to) {
      recorded->next(layer, rows, to);
    };
  }
  if (name == "model") return {};
  constexpr std::uint64_t seed = 1;
  auto planted = std::make_shared<imp::PlantedRouting>(h.layers, h.moe.experts, h.moe.used,
                                                       imp::read_curve(name, h.moe.experts), seed);
  return [planted](std::int64_t layer, std::int64_t rows, std::int32_t* to) {
    planted->next(layer, rows, to);
  };
}

nb::dict stats_dict(const imp::ExpertStats& s) {
  nb::dict out;
  out["layers"] = s.layers;
  out["experts"] = s.experts;
  out["slots"] = s.slots;
  out["blob_bytes"] = s.blob_bytes;
  out["store_bytes"] = s.store_bytes;
  out["pin_seconds"] = s.pin_seconds;
  out["fill_seconds"] = s.fill_seconds;
  std::vector<std::int64_t> wanted, hits, kept, fetch_ns;
  for (const auto& layer : s.by_layer) {
    wanted.push_back(layer.wanted);
    hits.push_back(layer.hits);
    kept.push_back(layer.kept);
    fetch_ns.push_back(layer.fetch_ns);
  }
  out["wanted"] = wanted;
  out["hits"] = hits;
  out["kept"] = kept;
  out["fetch_ns"] = fetch_ns;
  return out;
}

nb::object tap_array(const imp::TapData& t) {
  auto* copy = new std::vector<std::byte>(t.data);
  const nb::capsule owner(copy,
                          [](void* p) noexcept { delete static_cast<std::vector<std::byte>*>(p); });
  const auto rows = static_cast<std::size_t>(t.rows), cols = static_cast<std::size_t>(t.cols);
  if (t.dtype == imp::DType::i32)
    return nb::cast(
        nb::ndarray<nb::numpy, std::int32_t, nb::ndim<2>>(copy->data(), {rows, cols}, owner));
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(copy->data(), {rows, cols}, owner));
}

}  // namespace

void bind_session(nb::module_& m) {
  m.attr("USUAL_STEP_TIMEOUT") = imp::usual_step_timeout;
  nb::class_<DeviceWeights>(m, "DeviceWeights", "Weights on the device while sessions use them.")
      .def(nb::init<>())
      .def_prop_ro("device_bytes",
                   [](const DeviceWeights& w) { return imp::weight_bytes(*w.handle).device; })
      .def_prop_ro("pinned_bytes",
                   [](const DeviceWeights& w) { return imp::weight_bytes(*w.handle).pinned; });
  nb::class_<PySession>(m, "Session", "Sequences over one model. One thread at a time.")
      .def(
          "__init__",
          [](PySession* self, std::shared_ptr<imp::Model> model, std::int64_t n_ctx,
             std::int64_t max_seqs, std::int64_t n_ubatch, int n_threads,
             const std::string& kernels, std::vector<std::string> taps, bool poison, bool profile,
             const std::string& device, bool graphs, bool batch_invariant,
             std::int64_t cache_tokens, std::int64_t rollback_tokens, std::int64_t max_outputs,
             const std::string& cache_type_k, const std::string& cache_type_v,
             const std::string& routing, const std::optional<RoutingIds>& routing_ids,
             std::int64_t expert_slots, const std::string& expert_policy, std::int64_t ram_limit,
             const DeviceWeights* weights, bool verify_experts, double step_timeout,
             bool overlap_gathers) {
            const imp::CudaOptions cuda{0,
                                        graphs,
                                        batch_invariant,
                                        expert_slots,
                                        imp::read_policy(expert_policy),
                                        static_cast<std::size_t>(ram_limit),
                                        verify_experts,
                                        step_timeout,
                                        overlap_gathers,
                                        poison};
            if (!(step_timeout > 0 && step_timeout <= imp::max_step_timeout))
              imp::fail(imp::ErrorCode::invalid_argument,
                        imp::str("a step timeout of ", step_timeout,
                                 " s; imp takes more than 0 to ", imp::max_step_timeout));
            if (expert_slots >= 0 && device != "cuda")
              imp::fail(imp::ErrorCode::invalid_argument,
                        imp::str(expert_slots, " expert slots on the ", device,
                                 "; the cache is for CUDA"));
            const imp::HParams& h = model->hparams();
            auto ids = routed_by(h, routing, routing_ids);
            new (self) PySession(
                std::move(model),
                {n_ctx,
                 max_seqs,
                 n_ubatch,
                 std::move(taps),
                 poison,
                 profile,
                 cache_tokens,
                 rollback_tokens,
                 max_outputs,
                 {imp::cache_type(cache_type_k), imp::cache_type(cache_type_v)},
                 std::move(ids)},
                device == "cuda" ? imp::make_cuda_backend(cuda, weights ? weights->handle : nullptr)
                                 : imp::make_cpu_backend({n_threads, kernels}));
          },
          nb::arg("model"), nb::kw_only(), nb::arg("n_ctx") = 0, nb::arg("max_seqs") = 1,
          nb::arg("n_ubatch") = 512, nb::arg("n_threads") = 0, nb::arg("kernels") = "auto",
          nb::arg("taps") = std::vector<std::string>{}, nb::arg("poison") = false,
          nb::arg("profile") = false, nb::arg("device") = "cpu", nb::arg("graphs") = true,
          nb::arg("batch_invariant") = false, nb::arg("cache_tokens") = 0,
          nb::arg("rollback_tokens") = 0, nb::arg("max_outputs") = 0,
          nb::arg("cache_type_k") = "f32", nb::arg("cache_type_v") = "f32",
          nb::arg("routing") = "model", nb::arg("routing_ids") = nb::none(),
          nb::arg("expert_slots") = -1, nb::arg("expert_policy") = imp::usual_policy,
          nb::arg("ram_limit") = 0, nb::arg("weights") = nb::none(),
          nb::arg("verify_experts") = false, nb::arg("step_timeout") = imp::usual_step_timeout,
          nb::arg("overlap_gathers") = true)
      .def("close", &PySession::close)
      .def_prop_ro("n_ctx",
                   [](PySession& s) { return s.use([](imp::Session& x) { return x.n_ctx(); }); })
      .def_prop_ro("n_ubatch",
                   [](PySession& s) { return s.use([](imp::Session& x) { return x.n_ubatch(); }); })
      .def_prop_ro("backend",
                   [](PySession& s) {
                     return s.use([](imp::Session& x) {
                       const imp::BackendInfo info = x.backend().info();
                       return info.name + ": " + info.detail;
                     });
                   })
      .def("expert_stats",
           [](PySession& s) {
             return s.use([](imp::Session& x) { return stats_dict(x.backend().expert_stats()); });
           })
      .def(
          "verify_experts",
          [](PySession& s) {
            imp::ExpertCheck check;
            {
              nb::gil_scoped_release unlocked;
              check = s.use([](imp::Session& x) { return x.backend().verify_experts(); });
            }
            std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> damaged;
            for (const imp::DamagedExpert& e : check.damaged)
              damaged.emplace_back(e.layer, e.expert, e.slot);
            return std::make_tuple(check.slots, check.stored, damaged);
          },
          "(slots compared, experts of the store compared, [(layer, expert, slot)] that differ); "
          "slot -1 = in the store.")
      .def(
          "damage_slot",
          [](PySession& s, std::int64_t slot) {
            s.use([&](imp::Session& x) { x.backend().damage_slot(slot); });
          },
          nb::arg("slot"), "Flips a bit of a cached expert, for tests.")
      .def_prop_ro(
          "arena_bytes",
          [](PySession& s) { return s.use([](imp::Session& x) { return x.arena_bytes(); }); })
      .def_prop_ro("compiled",
                   [](PySession& s) { return s.use([](imp::Session& x) { return x.compiled(); }); })
      .def_prop_ro("free_pages",
                   [](PySession& s) {
                     return s.use([](imp::Session& x) { return x.memory().page_pool().free(); });
                   })
      .def_prop_ro("free_rows",
                   [](PySession& s) {
                     return s.use([](imp::Session& x) { return x.memory().row_pool().free(); });
                   })
      .def_prop_ro("pages",
                   [](PySession& s) {
                     return s.use([](imp::Session& x) { return x.memory().page_pool().size(); });
                   })
      .def_prop_ro("page_bytes",
                   [](PySession& s) {
                     return s.use([](imp::Session& x) {
                       return imp::memory_cost(x.model().hparams(), x.cache_types()).page_bytes;
                     });
                   })
      .def_prop_ro("row_bytes",
                   [](PySession& s) {
                     return s.use([](imp::Session& x) {
                       return imp::memory_cost(x.model().hparams(), x.cache_types()).row_bytes;
                     });
                   })
      .def_prop_ro(
          "cache_types",
          [](PySession& s) {
            const imp::CacheTypes types = s.use([](imp::Session& x) { return x.cache_types(); });
            return std::make_tuple(imp::cache_type_name(types.k), imp::cache_type_name(types.v));
          })
      .def_prop_ro("page_tokens",
                   [](PySession& s) {
                     return s.use([](imp::Session& x) { return x.memory().page_tokens(); });
                   })
      .def_prop_ro("rows",
                   [](PySession& s) {
                     return s.use([](imp::Session& x) { return x.memory().row_pool().size(); });
                   })
      .def(
          "sequence_pages",
          [](PySession& s, std::int64_t seq) {
            return s.use([&](imp::Session& x) { return x.pages(seq); });
          },
          nb::arg("seq"), "Ids of its cache pages, in order; forks share them.")
      .def(
          "pages_held_by",
          [](PySession& s, const std::vector<std::int64_t>& seqs) {
            return s.use([&](imp::Session& x) { return x.pages_held_by(seqs); });
          },
          nb::arg("seqs"), "Pages that closing all of these sequences would free.")
      .def(
          "truncate",
          [](PySession& s, std::int64_t seq, std::int64_t length) {
            nb::gil_scoped_release unlocked;
            s.use([&](imp::Session& x) {
              if (auto r = x.truncate(seq, length); !r)
                imp::fail(imp::ErrorCode::out_of_memory, r.error().message());
            });
          },
          nb::arg("seq"), nb::arg("length"))
      .def(
          "oldest_length",
          [](PySession& s, std::int64_t seq) {
            return s.use([&](imp::Session& x) { return x.oldest_length(seq); });
          },
          nb::arg("seq"), "The shortest length that truncate() takes now.")
      .def(
          "save",
          [](PySession& s, std::int64_t seq) {
            std::vector<std::byte> bytes;
            {
              nb::gil_scoped_release unlocked;
              bytes = s.use([&](imp::Session& x) { return imp::pack(x.save(seq)); });
            }
            return nb::bytes(bytes.data(), bytes.size());
          },
          nb::arg("seq"), "The sequence as bytes that restore() takes.")
      .def(
          "restore",
          [](PySession& s, const nb::bytes& snapshot, const std::string& name) {
            const std::span bytes(static_cast<const std::byte*>(snapshot.data()), snapshot.size());
            nb::gil_scoped_release unlocked;
            return s.use([&](imp::Session& x) {
              const imp::Snapshot saved = imp::unpack(bytes, name);
              if (saved.model != x.model_hash())
                imp::fail(imp::ErrorCode::invalid_argument, name + ": a snapshot of another model");
              if (saved.types != x.cache_types())
                imp::fail(imp::ErrorCode::invalid_argument,
                          imp::str(name, ": a snapshot of ", imp::describe(saved.types),
                                   ", the session stores ", imp::describe(x.cache_types())));
              return unwrap(x.restore(saved));
            });
          },
          nb::arg("snapshot"), nb::arg("name") = "the snapshot",
          "A new sequence from what save() gave; errors begin with `name`.")
      .def_prop_ro(
          "model_hash",
          [](PySession& s) { return s.use([](imp::Session& x) { return x.model_hash(); }); },
          "Of the model's keys, tensors, a sample of their contents and the n-gram scale, as in "
          "its "
          "snapshots.")
      .def("open",
           [](PySession& s) { return s.use([](imp::Session& x) { return unwrap(x.open()); }); })
      .def(
          "fork",
          [](PySession& s, std::int64_t seq) {
            return s.use([&](imp::Session& x) { return unwrap(x.fork(seq)); });
          },
          nb::arg("seq"))
      .def(
          "close_sequence",
          [](PySession& s, std::int64_t seq) { s.use([&](imp::Session& x) { x.close(seq); }); },
          nb::arg("seq"))
      .def(
          "tokens",
          [](PySession& s, std::int64_t seq) {
            return s.use([&](imp::Session& x) { return x.tokens(seq); });
          },
          nb::arg("seq"))
      .def(
          "length",
          [](PySession& s, std::int64_t seq) {
            return s.use([&](imp::Session& x) { return std::ssize(x.tokens(seq)); });
          },
          nb::arg("seq"))
      .def(
          "step",
          [](PySession& s, const Requests& requests) {
            const std::vector<imp::StepRequest> step = step_requests(requests);
            std::int64_t vocab = 0;
            imp::Logits logits;
            {
              nb::gil_scoped_release unlocked;
              s.use([&](imp::Session& x) {
                vocab = x.model().hparams().vocab;
                logits = unwrap(x.step(step));
              });
            }
            static const float nothing = 0;
            return LogitsArray(
                logits.rows == 0 ? &nothing : logits.data,
                {static_cast<std::size_t>(logits.rows), static_cast<std::size_t>(vocab)},
                owner(std::move(logits.memory)));
          },
          nb::arg("requests").noconvert(),
          "Runs [(sequence, int32 tokens, first output)] in one step. Returns float32 [outputs, "
          "vocab], a view that is "
          "valid until the next step.")
      .def(
          "choose",
          [](PySession& s, const Requests& requests,
             const std::vector<std::optional<imp::Draw>>& draws) {
            const std::vector<imp::StepRequest> step = step_requests(requests);
            std::vector<imp::Draw> all;
            for (const auto& d : draws) all.push_back(d.value_or(imp::Draw{}));
            std::vector<imp::Choice> choices;
            std::int64_t vocab = 0;
            {
              nb::gil_scoped_release unlocked;
              s.use([&](imp::Session& x) {
                vocab = x.model().hparams().vocab;
                choices = unwrap(x.choose(step, all));
              });
            }
            std::vector<std::variant<std::int32_t, LogitsRow>> out;
            for (imp::Choice& c : choices)
              if (c.token >= 0)
                out.emplace_back(c.token);
              else
                out.emplace_back(LogitsRow(c.logits.data, {static_cast<std::size_t>(vocab)},
                                           owner(std::move(c.logits.memory))));
            return out;
          },
          nb::arg("requests").noconvert(), nb::arg("draws"),
          "As step(), with a Draw or None for each output. Returns for each output its token, or "
          "where the host has to choose its logits, float32 [vocab], a view that is valid until "
          "the next step.")
      .def(
          "op_times",
          [](PySession& s) {
            return s.use([](imp::Session& x) {
              nb::dict d;
              for (const auto& [name, t] : x.op_times())
                d[name.c_str()] = nb::make_tuple(t.seconds, t.calls);
              return d;
            });
          },
          "Op name -> (seconds, calls) since the session was opened with profile=True.")
      .def("taps", [](PySession& s) {
        return s.use([](imp::Session& x) {
          nb::dict d;
          for (const imp::TapData& t : x.taps()) d[t.name.c_str()] = tap_array(t);
          return d;
        });
      });

  m.def(
      "snapshot_info",
      [](const nb::bytes& snapshot, const std::string& name) {
        imp::Snapshot saved;
        const std::span bytes(static_cast<const std::byte*>(snapshot.data()), snapshot.size());
        {
          nb::gil_scoped_release unlocked;
          saved = imp::unpack(bytes, name);
        }
        return std::make_tuple(saved.model, std::move(saved.tokens));
      },
      nb::arg("snapshot"), nb::arg("name") = "the snapshot",
      "Checks the bytes and returns (model hash, tokens).");
  m.def(
      "token_nll",
      [](nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> logits,
         Tokens targets, int n_threads) {
        const std::size_t n = targets.shape(0), vocab = logits.shape(1);
        if (logits.shape(0) != n)
          imp::fail(imp::ErrorCode::invalid_argument,
                    imp::str(logits.shape(0), " rows of logits for ", n, " targets"));
        auto* nll = new std::vector<double>(n);
        const nb::capsule owner(
            nll, [](void* p) noexcept { delete static_cast<std::vector<double>*>(p); });
        {
          nb::gil_scoped_release unlocked;
          imp::token_nll({logits.data(), n * vocab}, static_cast<std::int64_t>(vocab),
                         {targets.data(), n}, nll->data(), n_threads);
        }
        return nb::ndarray<nb::numpy, double, nb::ndim<1>>(nll->data(), {n}, owner);
      },
      nb::arg("logits").noconvert(), nb::arg("targets").noconvert(), nb::arg("n_threads") = 0,
      "-log softmax(logits)[target] per row: float32 [n, vocab], int32 [n] -> float64 [n]. Raises "
      "Error (numeric) naming "
      "the first row that is not finite.");
}
