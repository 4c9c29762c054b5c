// _core.Scheduler: the policy that Engine carries out.
#include "cpp/runtime/scheduler.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

#include "python/bindings/bindings.h"

namespace {

using imp::Scheduler;
using PieceTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, bool>;

std::tuple<std::string, std::int64_t> change(Scheduler::Change c) {
  switch (c.action) {
    case Scheduler::Action::preempt:
      return {"preempt", c.request};
    case Scheduler::Action::resume:
      return {"resume", c.request};
    case Scheduler::Action::start:
      return {"start", c.request};
    default:
      return {"", -1};
  }
}

}  // namespace

void bind_scheduler(nb::module_& m) {
  nb::class_<Scheduler>(m, "Scheduler", "Which tokens of which requests run in the next step.")
      .def(
          "__init__",
          [](Scheduler* self, std::int64_t step_tokens, std::int64_t prefill_tokens,
             std::int64_t n_ctx, std::int64_t page_tokens, std::int64_t pages,
             std::int64_t running) {
            new (self) Scheduler({step_tokens, prefill_tokens, n_ctx, page_tokens, pages, running});
          },
          nb::kw_only(), nb::arg("step_tokens"), nb::arg("prefill_tokens"), nb::arg("n_ctx"),
          nb::arg("page_tokens"), nb::arg("pages"), nb::arg("running"))
      .def("submit", &Scheduler::submit, nb::arg("id"), nb::arg("prompt"), nb::arg("stops"))
      .def(
          "change",
          [](Scheduler& s, std::int64_t rows, std::int64_t pages) {
            return change(s.change({rows, pages}));
          },
          nb::arg("rows"), nb::arg("pages"),
          "One change to carry out, given what is free: (\"preempt\", \"resume\", \"start\" or "
          "\"\", id).")
      .def("preempt", [](Scheduler& s) { return change(s.preempt()); })
      .def("cached", &Scheduler::cached, nb::arg("id"), nb::arg("tokens"))
      .def("put_back", &Scheduler::put_back, nb::arg("id"))
      .def(
          "step",
          [](const Scheduler& s) {
            std::vector<PieceTuple> out;
            for (const Scheduler::Piece& p : s.step())
              out.emplace_back(p.request, p.first, p.tokens, p.output);
            return out;
          },
          "[(id, first token, tokens, whether a token is chosen after them)]; nothing has changed "
          "until commit().")
      .def(
          "commit",
          [](Scheduler& s, const std::vector<PieceTuple>& pieces) {
            std::vector<Scheduler::Piece> in;
            for (const auto& [id, first, tokens, output] : pieces)
              in.push_back({id, first, tokens, output});
            s.commit(in);
          },
          nb::arg("pieces"))
      .def("token", &Scheduler::token, nb::arg("id"))
      .def("shared", &Scheduler::shared, nb::arg("id"))
      .def("finish", &Scheduler::finish, nb::arg("id"))
      .def_prop_ro("needed", &Scheduler::needed)
      .def_prop_ro("waiting", &Scheduler::waiting)
      .def_prop_ro("running", &Scheduler::running);
}
