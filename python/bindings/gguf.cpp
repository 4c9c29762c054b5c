// _core.Gguf: keys as Python values, tensors as zero-copy views or decoded rows.
#include "cpp/gguf/gguf.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <type_traits>

#include "cpp/core/error.h"
#include "python/bindings/bindings.h"

namespace {

using imp::gguf::Array;
using imp::gguf::Gguf;
using imp::gguf::quote;
using imp::gguf::TensorInfo;
using imp::gguf::Value;
using imp::gguf::ValueType;
using Bytes = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>>;
using Rows = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;

// Not every string of a file is UTF-8; other bytes survive as lone surrogates.
nb::object to_str(std::string_view s) {
  PyObject* text =
      PyUnicode_DecodeUTF8(s.data(), static_cast<Py_ssize_t>(s.size()), "surrogateescape");
  if (text == nullptr) throw nb::python_error();
  return nb::steal(text);
}

std::string to_bytes(const nb::str& s) {
  nb::object bytes = nb::steal(PyUnicode_AsEncodedString(s.ptr(), "utf-8", "surrogateescape"));
  if (!bytes.is_valid()) throw nb::python_error();
  return std::string(PyBytes_AS_STRING(bytes.ptr()),
                     static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.ptr())));
}

template <class T>
nb::object view(const T* data, std::size_t size, nb::handle owner) {
  static const T nothing{};  // an empty vector may have no address
  return nb::cast(
      nb::ndarray<nb::numpy, const T, nb::ndim<1>>(size == 0 ? &nothing : data, {size}, owner));
}

// Numbers and booleans become read-only arrays over the file's own values, kept alive by `owner`.
nb::object to_python(const Array& array, nb::handle owner) {
  return std::visit(
      [&](const auto& v) -> nb::object {
        using T = typename std::decay_t<decltype(v)>::value_type;
        if constexpr (std::is_same_v<T, std::string> || std::is_same_v<T, Array>) {
          nb::list out;
          for (const T& x : v) {
            if constexpr (std::is_same_v<T, Array>)
              out.append(to_python(x, owner));
            else
              out.append(to_str(x));
          }
          return out;
        } else {
          if (array.element == ValueType::boolean)
            return view(reinterpret_cast<const bool*>(v.data()), v.size(), owner);
          return view(v.data(), v.size(), owner);
        }
      },
      array.data);
}

nb::object to_python(const Value& value, nb::handle owner) {
  return std::visit(
      [&](const auto& v) -> nb::object {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, Array>)
          return to_python(v, owner);
        else if constexpr (std::is_same_v<T, std::string>)
          return to_str(v);
        else
          return nb::cast(v);
      },
      value.data);
}

// "u32", "string", "i32[]", "array[]".
std::string type_name(const Value& value) {
  if (const Array* a = std::get_if<Array>(&value.data)) return std::string(name(a->element)) + "[]";
  return std::string(name(value.type));
}

const TensorInfo& tensor(const Gguf& g, const nb::str& python_name) {
  const std::string name = to_bytes(python_name);
  if (const TensorInfo* t = g.find(name)) return *t;
  imp::fail(imp::ErrorCode::invalid_argument,
            imp::str(g.path(), ": there is no tensor ", quote(name)));
}

// The type to decode as: another one only if it lays out rows in the same bytes.
imp::DType decode_type(const TensorInfo& t, const std::optional<std::string>& as_type) {
  if (!as_type) return t.dtype;
  for (const imp::TypeInfo& type : imp::type_table()) {
    if (type.name != *as_type) continue;
    const std::size_t stored = imp::row_bytes(t.dtype, t.dims[0]);
    const std::size_t wanted = imp::row_bytes(type.dtype, t.dims[0]);
    if (stored == wanted) return type.dtype;
    imp::fail(imp::ErrorCode::invalid_argument,
              imp::str("a row of tensor ", quote(t.name), " has ", stored, " bytes, as ", *as_type,
                       " it would have ", wanted));
  }
  imp::fail(imp::ErrorCode::invalid_argument, imp::str("there is no type '", *as_type, "'"));
}

Rows decode(const Gguf& g, const nb::str& name, std::int64_t row0, std::int64_t n_rows,
            const std::optional<std::string>& as_type) {
  const TensorInfo& t = tensor(g, name);
  const imp::DType dtype = decode_type(t, as_type);
  if (!imp::type_info(dtype).computes)
    imp::fail(imp::ErrorCode::unsupported,
              imp::str("tensor ", quote(t.name), " is ", imp::type_info(dtype).name,
                       ", which imp does not decode"));
  const std::int64_t width = t.dims[0];
  const std::int64_t rows = t.n_elems() / width;
  if (row0 < 0 || n_rows < 0 || row0 > rows || n_rows > rows - row0)
    imp::fail(imp::ErrorCode::invalid_argument,
              imp::str("rows ", row0, " to ", row0, " + ", n_rows, " of tensor ", quote(t.name),
                       ", which has ", rows));
  const std::size_t stride = imp::row_bytes(dtype, width);
  auto* out = new float[static_cast<std::size_t>(n_rows * width)];
  const nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  {
    const nb::gil_scoped_release unlocked;
    for (std::int64_t r = 0; r < n_rows; ++r)
      imp::decode_row(dtype, t.data + static_cast<std::size_t>(row0 + r) * stride, width,
                      out + r * width);
  }
  return Rows(out, {static_cast<std::size_t>(n_rows), static_cast<std::size_t>(width)}, owner);
}

}  // namespace

void bind_gguf(nb::module_& m) {
  nb::class_<TensorInfo>(m, "TensorInfo", "Where a tensor of a GGUF file is and what it holds.")
      .def_prop_ro(
          "name", [](const TensorInfo& t) { return to_str(t.name); },
          nb::sig("def name(self) -> str"))
      .def_prop_ro(
          "type", [](const TensorInfo& t) { return imp::type_info(t.dtype).name; },
          "ggml's name: 'F32', 'NVFP4', ...")
      .def_ro("dims", &TensorInfo::dims, "Fastest-varying first (ggml's ne).")
      .def_ro("n_bytes", &TensorInfo::n_bytes)
      .def_prop_ro("n_elems", &TensorInfo::n_elems)
      .def_ro("shard", &TensorInfo::shard, "Index into Gguf.files.")
      .def_ro("offset", &TensorInfo::file_offset, "Bytes from the start of that file.")
      .def("__repr__", [](const TensorInfo& t) {
        std::string dims;
        for (const std::int64_t d : t.dims) dims += imp::str(dims.empty() ? "" : ", ", d);
        return imp::str("TensorInfo(", quote(t.name), ", ", imp::type_info(t.dtype).name, ", [",
                        dims, "])");
      });

  nb::class_<Gguf>(m, "Gguf", "A GGUF file, mapped read-only; all shards of a split one.")
      .def_static(
          "open",
          [](const std::filesystem::path& path) {
            return std::const_pointer_cast<Gguf>(Gguf::open(path.string()));
          },
          nb::arg("path"), nb::call_guard<nb::gil_scoped_release>(),
          nb::sig("def open(path: str | os.PathLike[str]) -> Gguf"),
          "Opens a file, or all shards of a split one, given any of them.\n\n"
          "Raises Error: io, bad_file, or unsupported (version, byte order, unknown type).")
      .def_prop_ro("path", [](const Gguf& g) { return std::filesystem::path(g.path()); })
      .def_prop_ro(
          "files",
          [](const Gguf& g) {
            std::vector<std::filesystem::path> out;
            for (const auto& file : g.files()) out.emplace_back(file->path());
            return out;
          },
          "Paths, one per shard.")
      .def_prop_ro("version", &Gguf::version)
      .def(
          "keys",
          [](nb::handle_t<Gguf> self) {
            nb::dict out;
            for (const auto& [key, value] : nb::cast<const Gguf&>(self).keys().map())
              out[to_str(key)] = to_python(value, self);
            return out;
          },
          nb::sig("def keys(self) -> dict[str, typing.Any]"),
          "All metadata. Scalars are int, float, bool or str; arrays of strings or arrays are "
          "lists;\nother arrays are read-only numpy arrays of the stored type.")
      .def(
          "key_types",
          [](const Gguf& g) {
            nb::dict out;
            for (const auto& [key, value] : g.keys().map()) out[to_str(key)] = type_name(value);
            return out;
          },
          nb::sig("def key_types(self) -> dict[str, str]"),
          "Stored types: 'u32', 'string', 'i32[]', 'array[]', ...")
      .def("tensors", &Gguf::tensors, nb::rv_policy::reference_internal, "In file order.")
      .def(
          "data",
          [](nb::handle_t<Gguf> self, const nb::str& name) {
            const TensorInfo& t = tensor(nb::cast<const Gguf&>(self), name);
            return Bytes(t.data, {t.n_bytes}, self);
          },
          nb::arg("name"),
          "The stored bytes, uint8 [n_bytes]: a read-only view that keeps the file open.\n\n"
          "Raises Error (invalid_argument) if there is no such tensor.")
      .def("decode", &decode, nb::arg("name"), nb::arg("row0"), nb::arg("n_rows"),
           nb::arg("as_type") = nb::none(),
           "Rows row0 .. row0 + n_rows as float32 [n_rows, dims[0]]; a tensor has\n"
           "n_elems / dims[0] rows. as_type: decode the bytes as this type instead, e.g.\n"
           "'F8_E4M3' for a table that the file types I8.\n\n"
           "Raises Error: unsupported (imp does not compute with the type), invalid_argument.");
}
