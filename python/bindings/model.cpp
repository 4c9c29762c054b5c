// _core.Model, the tensor table of an architecture, and facts about the machine.
#include "cpp/model/model.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "cpp/core/error.h"
#include "cpp/core/sysinfo.h"
#include "cpp/memory/cache_types.h"
#include "cpp/memory/sequence_memory.h"
#include "cpp/model/synthetic.h"
#include "cpp/runtime/backend.h"
#include "python/bindings/bindings.h"

namespace {

using imp::gguf::Array;
using imp::gguf::KeyValues;
using imp::gguf::Value;
using imp::gguf::ValueType;

const char* name(imp::Role role) {
  switch (role) {
    case imp::Role::vector:
      return "vector";
    case imp::Role::filter:
      return "filter";
    case imp::Role::matrix:
      return "matrix";
    case imp::Role::router:
      return "router";
    case imp::Role::embedding:
      return "embedding";
    case imp::Role::experts:
      return "experts";
    case imp::Role::table:
      return "table";
  }
  return "?";
}

// Text of a file need not be UTF-8; its other bytes are lone surrogates in Python.
std::string to_bytes(nb::handle text) {
  const nb::object bytes =
      nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogateescape"));
  if (!bytes.is_valid()) throw nb::python_error();
  return {PyBytes_AsString(bytes.ptr()), static_cast<std::size_t>(PyBytes_Size(bytes.ptr()))};
}

// A Python scalar or a sequence of scalars as the header would hold it.
Value to_value(const std::string& key, nb::handle v) {
  if (nb::isinstance<nb::bool_>(v)) return {ValueType::boolean, nb::cast<bool>(v)};
  if (nb::isinstance<nb::str>(v)) return {ValueType::string, to_bytes(v)};
  if (nb::isinstance<nb::float_>(v)) return {ValueType::f64, nb::cast<double>(v)};
  if (nb::hasattr(v, "tolist")) return to_value(key, v.attr("tolist")());  // numpy values
  if (nb::isinstance<nb::int_>(v)) {
    if (nb::cast<bool>(v.attr("__lt__")(0))) return {ValueType::i64, nb::cast<std::int64_t>(v)};
    return {ValueType::u64, nb::cast<std::uint64_t>(v)};
  }
  if (!nb::isinstance<nb::sequence>(v))
    imp::fail(imp::ErrorCode::invalid_argument,
              imp::str("key ", key, " holds a value that a header cannot"));
  const nb::sequence items = nb::cast<nb::sequence>(v);
  Array a;
  if (nb::len(items) == 0) {
    a.element = ValueType::i64;
    a.data = std::vector<std::int64_t>{};
  } else if (const nb::object first = items[0]; nb::isinstance<nb::bool_>(first)) {
    a.element = ValueType::boolean;
    std::vector<std::uint8_t> out;
    for (nb::handle x : items) out.push_back(nb::cast<bool>(x));
    a.data = std::move(out);
  } else if (nb::isinstance<nb::str>(first)) {
    a.element = ValueType::string;
    std::vector<std::string> out;
    for (nb::handle x : items) out.push_back(to_bytes(x));
    a.data = std::move(out);
  } else if (nb::isinstance<nb::float_>(first)) {
    a.element = ValueType::f64;
    a.data = nb::cast<std::vector<double>>(v);
  } else {
    bool negative = false;
    for (nb::handle x : items) negative = negative || nb::cast<bool>(x.attr("__lt__")(0));
    if (negative) {
      a.element = ValueType::i64;
      a.data = nb::cast<std::vector<std::int64_t>>(v);
    } else {
      a.element = ValueType::u64;
      a.data = nb::cast<std::vector<std::uint64_t>>(v);
    }
  }
  return {ValueType::array, std::move(a)};
}

KeyValues to_keys(const nb::dict& keys) {
  KeyValues kv;
  for (auto [k, v] : keys) {
    const std::string key = to_bytes(k);
    try {
      kv.set(key, to_value(key, v));
    } catch (const std::bad_cast&) {
      imp::fail(imp::ErrorCode::invalid_argument,
                imp::str("key ", key, " holds values of different types"));
    }
  }
  return kv;
}

const imp::Arch& need_arch(const std::string& arch) {
  const imp::Arch* a = imp::find_arch(arch);
  if (a == nullptr)
    imp::fail(imp::ErrorCode::unsupported,
              imp::str("architecture '", arch, "' is not one imp runs"));
  return *a;
}

nb::dict system_info() {
  const imp::MemoryInfo memory = imp::memory_info();
  const imp::CudaStatus cuda = imp::cuda_status();
  nb::dict d;
  d["cpu_features"] = imp::describe(imp::cpu_features());
  d["processors"] = imp::usable_processors();
  d["memory_total_bytes"] = memory.total_bytes;
  d["memory_available_bytes"] = memory.available_bytes;
  d["memory_limited_by"] = memory.limited_by;
  d["peak_rss_bytes"] = imp::peak_rss_bytes();
  d["cuda_built"] = cuda.built;
  d["cuda_usable"] = cuda.usable;
  d["cuda_detail"] = cuda.detail;
  d["cuda_architectures"] = cuda.architectures;
  d["cuda_free_bytes"] = cuda.free_bytes;
  d["cuda_total_bytes"] = cuda.total_bytes;
  return d;
}

}  // namespace

void bind_model(nb::module_& m) {
  nb::class_<imp::TensorSpec>(m, "TensorSpec", "One tensor that an architecture needs.")
      .def_ro("name", &imp::TensorSpec::name, "GGUF name")
      .def_ro("dims", &imp::TensorSpec::dims, "fastest-varying first")
      .def_prop_ro(
          "role", [](const imp::TensorSpec& s) { return name(s.role); },
          "vector, filter, matrix, router, embedding, experts or table")
      .def_ro("required", &imp::TensorSpec::required);

  m.def(
      "tensor_table",
      [](const std::string& arch, const nb::dict& keys) {
        const imp::Arch& a = need_arch(arch);
        return a.tensors(a.read(to_keys(keys)));
      },
      nb::arg("arch"), nb::arg("keys"),
      "Tensors that a file with these metadata keys must have. Raises Error naming the key and "
      "both values.");

  m.def(
      "memory_cost",
      [](const std::string& arch, const nb::dict& keys, const std::string& cache_type_k,
         const std::string& cache_type_v) {
        const imp::HParams h = need_arch(arch).read(to_keys(keys));
        const imp::MemoryCost cost =
            imp::memory_cost(h, {imp::cache_type(cache_type_k), imp::cache_type(cache_type_v)});
        nb::dict d;
        d["page_tokens"] = imp::page_tokens(h);
        d["page_bytes"] = cost.page_bytes;
        d["row_bytes"] = cost.row_bytes;
        return d;
      },
      nb::arg("arch"), nb::arg("keys"), nb::arg("cache_type_k") = "f32",
      nb::arg("cache_type_v") = "f32",
      "What a sequence takes: page_bytes per page_tokens tokens of cache, row_bytes of fixed "
      "state.");

  m.def("architectures", [] {
    std::vector<std::string> names;
    for (const imp::Arch* a : imp::archs()) names.emplace_back(a->name);
    return names;
  });
  m.def("system_info", &system_info, "Processor, memory and CUDA facts of this machine.");
  m.def(
      "cublas_lt",
      [](const std::string& file) {
        const imp::CublasLtStatus s = imp::cublas_lt_status(file);
        return std::pair(s.found, s.detail);
      },
      nb::arg("file") = "",
      "Whether cuBLASLt is found, and its version and place or why there is none. `file`: a "
      "library's name instead of the usual one.");

  nb::class_<imp::Model>(m, "Model", "A mapped, checked model file.")
      .def_static(
          "load",
          [](const std::filesystem::path& path, float ngram_scale) {
            return std::const_pointer_cast<imp::Model>(
                imp::Model::load(path.string(), {ngram_scale}));
          },
          nb::sig("def load(path: str | os.PathLike[str], ngram_scale: float = 0.0) -> Model"),
          nb::arg("path"), nb::arg("ngram_scale") = 0.0f, nb::call_guard<nb::gil_scoped_release>())
      .def_static(
          "synthetic",
          [](const std::string& spec, bool on_host,
             const std::optional<std::filesystem::path>& table) {
            return std::const_pointer_cast<imp::Model>(
                imp::make_synthetic(spec, on_host, table ? table->string() : ""));
          },
          nb::sig("def synthetic(spec: str, on_host: bool, "
                  "table_file: str | os.PathLike[str] | None = None) -> Model"),
          nb::arg("spec"), nb::arg("on_host"), nb::arg("table_file") = nb::none(),
          nb::call_guard<nb::gil_scoped_release>(),
          "Random weights of a released shape, such as 'flash-next:layers=4,experts=64'. Without "
          "on_host most of them exist on the device alone; the n-gram table can be in a file.")
      .def_prop_ro("path", [](const imp::Model& x) { return x.path(); })
      .def_prop_ro(
          "gguf", [](const imp::Model& x) -> const imp::gguf::Gguf& { return x.file(); },
          nb::rv_policy::reference_internal, "The file, or the header of a synthetic model.")
      .def_prop_ro("arch", [](const imp::Model& x) { return x.hparams().arch; })
      .def_prop_ro("vocab_size", [](const imp::Model& x) { return x.hparams().vocab; })
      .def_prop_ro("context_length", [](const imp::Model& x) { return x.hparams().context_length; })
      .def_prop_ro("layers", [](const imp::Model& x) { return x.hparams().layers; })
      .def_prop_ro("mtp_layers", [](const imp::Model& x) { return x.hparams().mtp_layers; })
      .def_prop_ro("notes", [](const imp::Model& x) { return x.notes(); })
      .def_prop_ro("resident_bytes", &imp::Model::resident_bytes)
      .def_prop_ro("table_bytes", &imp::Model::table_bytes)
      .def("prefetch", &imp::Model::prefetch, nb::arg("begin"), nb::arg("end"),
           nb::call_guard<nb::gil_scoped_release>(),
           "Reads bytes [begin, end) of resident_bytes into the page cache.");
}
