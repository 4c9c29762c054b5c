// _core.PlantedRouting and _core.simulate_experts: routing without a model, caches without weights.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "cpp/core/error.h"
#include "cpp/runtime/expert_sim.h"
#include "cpp/runtime/planted_routing.h"
#include "python/bindings/bindings.h"

namespace {

using IdsArray = nb::ndarray<nb::numpy, std::uint16_t, nb::ndim<3>>;
using Ids = nb::ndarray<const std::uint16_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

struct PyRouting {
  imp::PlantedRouting routing;
  std::int64_t layers, k;
};

IdsArray planted(PyRouting& p, std::int64_t rows) {
  if (rows < 0) imp::fail(imp::ErrorCode::invalid_argument, imp::str(rows, " tokens"));
  const auto n = static_cast<std::size_t>(rows * p.layers * p.k);
  auto ids = std::make_unique<std::vector<std::uint16_t>>(n);
  std::vector<std::int32_t> one(static_cast<std::size_t>(p.k));
  std::uint16_t* to = ids->data();
  {
    const nb::gil_scoped_release release;
    for (std::int64_t t = 0; t < rows; ++t)
      for (std::int64_t l = 0; l < p.layers; ++l) {
        p.routing.next(l, 1, one.data());
        for (const std::int32_t e : one) *to++ = static_cast<std::uint16_t>(e);
      }
  }
  std::uint16_t* data = ids->data();
  const nb::capsule owner(
      ids.release(), [](void* v) noexcept { delete static_cast<std::vector<std::uint16_t>*>(v); });
  return IdsArray(data,
                  {static_cast<std::size_t>(rows), static_cast<std::size_t>(p.layers),
                   static_cast<std::size_t>(p.k)},
                  owner);
}

nb::dict simulate(const Ids& ids, std::vector<std::int32_t> step_rows, std::int64_t experts,
                  std::int64_t slots, const std::string& policy, std::int64_t first_counted) {
  const imp::RoutingTrace trace{static_cast<std::int64_t>(ids.shape(1)),
                                experts,
                                static_cast<std::int64_t>(ids.shape(2)),
                                std::move(step_rows),
                                {ids.data(), ids.size()}};
  imp::SimResult r;
  {
    const nb::gil_scoped_release release;
    r = imp::simulate(trace, slots, imp::read_policy(policy), first_counted);
  }
  nb::dict out;
  out["wanted"] = r.wanted;
  out["hits"] = r.hits;
  out["kept"] = r.kept;
  out["uncached"] = r.uncached;
  out["layer_wanted"] = r.layer_wanted;
  out["layer_hits"] = r.layer_hits;
  return out;
}

}  // namespace

void bind_experts(nb::module_& m) {
  nb::class_<PyRouting>(m, "PlantedRouting", "Expert ids that follow a hit curve.")
      .def(
          "__init__",
          [](PyRouting* self, std::int64_t layers, std::int64_t experts, std::int64_t k,
             const std::string& curve, std::uint64_t seed) {
            new (self)
                PyRouting{{layers, experts, k, imp::read_curve(curve, experts), seed}, layers, k};
          },
          nb::kw_only(), nb::arg("layers"), nb::arg("experts"), nb::arg("k"), nb::arg("curve"),
          nb::arg("seed"))
      .def("next", &planted, nb::arg("rows"),
           "The next tokens' experts: uint16 [rows, layers, k], most wanted first.");
  m.attr("USUAL_EXPERT_POLICY") = imp::usual_policy;
  m.def(
      "staging_slots",
      [](std::int64_t layers, std::int64_t experts, std::int64_t slots, const std::string& policy) {
        return imp::staging_slots({layers, experts, slots}, imp::read_policy(policy));
      },
      nb::kw_only(), nb::arg("layers"), nb::arg("experts"), nb::arg("slots"), nb::arg("policy"),
      "Places for experts that the device's cache needs beside its slots.");
  m.def("simulate_experts", &simulate, nb::arg("ids"), nb::arg("step_rows"), nb::kw_only(),
        nb::arg("experts"), nb::arg("slots"), nb::arg("policy"), nb::arg("first_counted"),
        "Runs ids [tokens, layers, k] through a cache: counts of distinct experts from step "
        "first_counted on.");
}
