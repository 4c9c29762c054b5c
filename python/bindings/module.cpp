// imp_runtime._core: the exception, then one bind function per file.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>

#include "cpp/core/error.h"
#include "python/bindings/bindings.h"

namespace {

const char* name(imp::ErrorCode code) {
  switch (code) {
    case imp::ErrorCode::invalid_argument:
      return "invalid_argument";
    case imp::ErrorCode::bad_file:
      return "bad_file";
    case imp::ErrorCode::unsupported:
      return "unsupported";
    case imp::ErrorCode::out_of_memory:
      return "out_of_memory";
    case imp::ErrorCode::io:
      return "io";
    case imp::ErrorCode::numeric:
      return "numeric";
    case imp::ErrorCode::timeout:
      return "timeout";
    case imp::ErrorCode::internal:
      return "internal";
  }
  return "internal";
}

// Messages may carry bytes of a path or a file that are not UTF-8.
nb::object text(const char* bytes) {
  PyObject* s = PyUnicode_DecodeUTF8(bytes, static_cast<Py_ssize_t>(std::strlen(bytes)), "replace");
  if (s == nullptr) throw nb::python_error();
  return nb::steal(s);
}

// imp::Error becomes imp_runtime.ImpError(message) with attributes `code` and `where`.
void bind_error(nb::module_& m) {
  nb::object type = nb::module_::import_("imp_runtime.errors").attr("ImpError");
  m.attr("Error") = type;
  nb::register_exception_translator(
      [](const std::exception_ptr& p, void* payload) {
        try {
          std::rethrow_exception(p);
        } catch (const imp::Error& e) {
          auto* type = static_cast<PyObject*>(payload);
          nb::object error = nb::handle(type)(text(e.what()));
          error.attr("code") = name(e.code());
          error.attr("where") = imp::str(e.where().file_name(), ":", e.where().line());
          PyErr_SetObject(type, error.ptr());
        }
      },
      type.release().ptr());  // lives as long as the process
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "C++ core of imp_runtime.";
  bind_error(m);
  bind_gguf(m);
  bind_ops(m);
  bind_session(m);
  bind_scheduler(m);
  bind_experts(m);
  bind_model(m);
  bind_sampler(m);
}
