// Binds the tensor table to a file.
#include "cpp/model/model.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_set>

#include "cpp/core/error.h"
#include "cpp/core/half.h"

namespace imp {

class Loader {
 public:
  Loader(Model& m, const LoadOptions& options) : m_(m), options_(options) {}

  void run() {
    const auto name = m_.file_->keys().string("general.architecture");
    if (!name) fail(ErrorCode::bad_file, str(m_.path(), ": no key general.architecture"));
    m_.arch_ = find_arch(*name);
    if (m_.arch_ == nullptr)
      fail(ErrorCode::unsupported,
           str(m_.path(), ": architecture '", *name, "' is not one imp runs"));
    try {
      m_.hparams_ = m_.arch_->read(m_.file_->keys());
    } catch (const Error& e) {
      fail(e.code(), str(m_.path(), ": ", e.what()), e.where());
    }
    m_.notes_ = m_.hparams_.notes;
    for (const TensorSpec& spec : m_.arch_->tensors(m_.hparams_)) bind(spec);
    for (const gguf::TensorInfo& t : m_.file_->tensors())
      if (!used_.contains(t.name)) problem(str("unknown tensor ", gguf::quote(t.name)));
    report();
  }

 private:
  void problem(std::string sentence) { problems_.push_back(std::move(sentence)); }

  void report() const {
    if (problems_.empty()) return;
    constexpr std::size_t most_shown = 20;
    std::string text =
        str(m_.path(), ": ", problems_.size(), problems_.size() == 1 ? " problem" : " problems");
    for (std::size_t i = 0; i < std::min(most_shown, problems_.size()); ++i)
      text += (i == 0 ? ": " : "; ") + problems_[i];
    if (problems_.size() > most_shown)
      text += str("; and ", problems_.size() - most_shown, " more");
    fail(ErrorCode::bad_file, text);
  }

  static std::string shape(const std::vector<std::int64_t>& dims) {
    std::string s = "[";
    for (std::size_t i = 0; i < dims.size(); ++i) s += str(i == 0 ? "" : ", ", dims[i]);
    return s + "]";
  }
  static bool same_shape(std::vector<std::int64_t> a, std::vector<std::int64_t> b) {
    const auto trim = [](std::vector<std::int64_t>& v) {
      while (v.size() > 1 && v.back() == 1) v.pop_back();
    };
    trim(a);
    trim(b);
    return a == b;
  }

  // The tensor of that name with the right shape and a type imp computes with, or nullptr after
  // noting the problem.
  const gguf::TensorInfo* find(const std::string& name, const std::vector<std::int64_t>& dims,
                               bool flat = false) {
    const gguf::TensorInfo* t = m_.file_->find(name);
    if (t == nullptr) {
      problem(str("missing tensor ", name, " ", shape(dims)));
      return nullptr;
    }
    used_.insert(name);
    const bool fits =
        same_shape(t->dims, dims) ||
        (flat && t->n_elems() == std::accumulate(dims.begin(), dims.end(), std::int64_t{1},
                                                 std::multiplies<>()));
    if (!fits) {
      problem(str("tensor ", name, " has shape ", shape(t->dims), ", ", shape(dims), " needed"));
      return nullptr;
    }
    if (!type_info(t->dtype).computes) {
      problem(str("tensor ", name, " has type ", type_info(t->dtype).name,
                  ", which imp does not compute with"));
      return nullptr;
    }
    return t;
  }

  std::vector<float> decode(const gguf::TensorInfo& t) const {
    std::vector<float> v(static_cast<std::size_t>(t.n_elems()));
    decode_row(t.dtype, t.data, t.n_elems(), v.data());
    return v;
  }

  // `<name>.scale`, n values; empty if the file has none.
  std::vector<float> scale(const std::string& weight, std::int64_t n) {
    const std::string name = scale_name(weight);
    // What vendors call the activations' scale is not needed with fp32 activations.
    std::string input = name;
    input.replace(input.size() - 5, 5, "input_scale");
    if (m_.file_->find(input) != nullptr) used_.insert(input);
    if (m_.file_->find(name) == nullptr) return {};
    const gguf::TensorInfo* t = find(name, {n});
    if (t == nullptr) return {};
    std::vector<float> v = decode(*t);
    for (std::size_t i = 0; i < v.size(); ++i)
      if (!std::isfinite(v[i])) problem(str("scale ", i, " of ", name, " is ", v[i]));
    return v;
  }

  Weight weight(const gguf::TensorInfo& t) const {
    Weight w;
    w.dtype = t.dtype;
    w.cols = t.dims[0];
    w.rows = t.dims.size() > 1 ? t.dims[1] : 1;
    w.row_bytes = row_bytes(t.dtype, w.cols);
    w.data = t.data;
    if (!m_.file_->files().empty()) {
      w.file = &m_.file_->files()[static_cast<std::size_t>(t.shard)]->reader();
      w.file_offset = t.file_offset;
    }
    return w;
  }

  void resident(const gguf::TensorInfo& t) {
    m_.resident_.push_back(&t);
    m_.resident_bytes_ += t.n_bytes;
  }

  void bind(const TensorSpec& spec) {
    switch (spec.role) {
      case Role::vector:
      case Role::filter:
        return bind_vector(spec);
      case Role::experts:
        return bind_experts(spec);
      case Role::table:
        return bind_table(spec);
      case Role::matrix:
      case Role::router:
      case Role::embedding:
        return bind_matrix(spec);
    }
  }

  void bind_vector(const TensorSpec& spec) {
    const gguf::TensorInfo* t = find(spec.name, spec.dims, spec.dims.size() == 1);
    if (t == nullptr) return;
    std::vector<float> v;
    if (spec.dims.size() ==
        2) {  // taps of a channel are contiguous in the file, channels of a tap here
      const std::int64_t taps = spec.dims[0], channels = spec.dims[1];
      const std::vector<float> file = decode(*t);
      v.resize(file.size());
      for (std::int64_t c = 0; c < channels; ++c)
        for (std::int64_t j = 0; j < taps; ++j)
          v[static_cast<std::size_t>(j * channels + c)] =
              file[static_cast<std::size_t>(c * taps + j)];
    } else {
      v = decode(*t);
    }
    m_.vectors_.emplace(spec.name, std::move(v));
  }

  void bind_matrix(const TensorSpec& spec) {
    if (!spec.required && m_.file_->find(spec.name) == nullptr) {
      if (spec.name == "output.weight" && m_.weights_.contains("token_embd.weight"))
        m_.weights_.emplace(spec.name, m_.weights_.at("token_embd.weight"));
      return;
    }
    const gguf::TensorInfo* t = find(spec.name, spec.dims);
    if (t == nullptr) return;
    Weight w = weight(*t);
    if (const std::vector<float> s = scale(spec.name, 1); !s.empty()) w.scale = s[0];
    resident(*t);
    m_.weights_.emplace(spec.name, w);
  }

  void bind_experts(const TensorSpec& spec) {
    const std::int64_t cols = spec.dims[0], rows = spec.dims[1], experts = spec.dims[2];
    std::string name = spec.name;
    std::int64_t first_row = 0, file_rows = rows;
    // Some converters fuse gate and up into one tensor, gate rows first.
    const bool gate = name.find("ffn_gate_exps") != std::string::npos,
               up = name.find("ffn_up_exps") != std::string::npos;
    if ((gate || up) && m_.file_->find(name) == nullptr) {
      std::string fused = name;
      fused.replace(fused.find(gate ? "ffn_gate_exps" : "ffn_up_exps"), gate ? 13 : 11,
                    "ffn_gate_up_exps");
      if (m_.file_->find(fused) != nullptr) {
        name = fused;
        file_rows = 2 * rows;
        first_row = up ? rows : 0;
      }
    }
    const gguf::TensorInfo* t = find(name, {cols, file_rows, experts});
    if (t == nullptr) return;
    ExpertBank bank;
    bank.expert = weight(*t);
    bank.expert.rows = rows;
    const std::size_t skipped = static_cast<std::size_t>(first_row) * bank.expert.row_bytes;
    bank.expert.data += skipped;
    bank.expert.file_offset += skipped;
    bank.experts = experts;
    bank.expert_bytes = static_cast<std::size_t>(file_rows) * bank.expert.row_bytes;
    if (std::vector<float> s = scale(name, experts); !s.empty()) {
      m_.scales_.push_back(std::move(s));
      bank.scales = m_.scales_.back().data();
    }
    if (first_row == 0) resident(*t);
    m_.banks_.emplace(spec.name, bank);
  }

  void bind_table(const TensorSpec& spec) {
    const std::string bytes_name = spec.name + "_e4m3";
    const bool fp8 = m_.file_->find(bytes_name) != nullptr;
    const std::string& name = fp8 ? bytes_name : spec.name;
    const gguf::TensorInfo* t = m_.file_->find(name);
    if (t == nullptr) return problem(str("missing tensor ", spec.name, " or ", bytes_name));
    used_.insert(name);
    const DType dtype = fp8 && t->dtype == DType::i8 ? DType::f8_e4m3 : t->dtype;
    if (t->dims.size() != 2 || t->dims[0] != spec.dims[0] || t->dims[1] < spec.dims[1])
      return problem(str("tensor ", name, " has shape ", shape(t->dims), ", ", shape(spec.dims),
                         " or more rows needed"));
    if (!type_info(dtype).computes)
      return problem(str("tensor ", name, " has type ", type_info(dtype).name));
    Weight w = weight(*t);
    w.dtype = dtype;
    const std::vector<float> s = scale(spec.name, 1);
    if (fp8 && s.empty()) return problem(str("tensor ", name, " has no ", scale_name(spec.name)));
    if (!s.empty()) w.scale = s[0];
    if (options_.ngram_scale != 0) {
      w.scale = options_.ngram_scale;
    } else if (s.empty() && looks_unscaled(w)) {
      problem(str(name,
                  " holds raw FP8 codes: its converter dropped the checkpoint's weight_scale; "
                  "convert again, or "
                  "give the value as ngram_scale"));
    }
    m_.table_bytes_ += t->n_bytes;
    m_.tables_.push_back({w, t->n_bytes, {}});
    if (!m_.file_->files().empty()) {  // else it is in memory
      m_.tables_.back().file = m_.file_->files()[static_cast<std::size_t>(t->shard)];
      m_.tables_.back().offset = t->file_offset;
      m_.tables_.back().file->advise(t->file_offset, t->n_bytes, gguf::MappedFile::Advice::random);
    }
    m_.weights_.emplace(spec.name, w);
  }

  // A table whose values all lie on the E4M3 grid and reach far beyond any embedding's size.
  static bool looks_unscaled(const Weight& w) {
    constexpr std::int64_t rows_sampled = 64;
    constexpr float implausible = 16;  // E4M3 codes reach 448; scaled rows stay near 1
    if (w.dtype != DType::bf16 && w.dtype != DType::f16 && w.dtype != DType::f32) return false;
    std::vector<float> row(static_cast<std::size_t>(w.cols));
    float top = 0;
    for (std::int64_t i = 0; i < std::min(rows_sampled, w.rows); ++i) {
      const std::int64_t r = i * (w.rows / std::min(rows_sampled, w.rows));
      decode_row(w.dtype, w.data + static_cast<std::size_t>(r) * w.row_bytes, w.cols, row.data());
      for (const float v : row) {
        const float a = std::abs(v);
        if (!(a <= 448) ||
            (a != 0 &&
             std::remainder(a, std::max(0x1p-9f, std::exp2(std::floor(std::log2(a)) - 3))) != 0))
          return false;
        top = std::max(top, a);
      }
    }
    return top > implausible;
  }

  Model& m_;
  const LoadOptions& options_;
  std::unordered_set<std::string> used_;
  std::vector<std::string> problems_;
};

std::shared_ptr<const Model> Model::load(const std::string& path, const LoadOptions& options) {
  return bind(gguf::Gguf::open(path), {}, options);
}

std::shared_ptr<Model> Model::bind(std::shared_ptr<const gguf::Gguf> file,
                                   std::shared_ptr<const void> memory, const LoadOptions& options) {
  auto model = std::make_shared<Model>();
  model->memory_ = std::move(memory);
  model->file_ = std::move(file);
  Loader(*model, options).run();
  return model;
}

namespace {
template <class Map>
const auto& lookup(const Map& map, std::string_view name) {
  const auto it = map.find(std::string(name));
  if (it == map.end()) fail(ErrorCode::internal, str("no tensor ", name, " in the model"));
  return it->second;
}
}  // namespace

const Weight& Model::weight(std::string_view name) const { return lookup(weights_, name); }
const ExpertBank& Model::experts(std::string_view name) const { return lookup(banks_, name); }
Vector Model::vector(std::string_view name) const {
  const std::vector<float>& v = lookup(vectors_, name);
  return {v.data(), std::ssize(v)};
}

void Model::prefetch(std::size_t begin, std::size_t end) const {
  if (file_->files().empty()) return;  // in memory
  constexpr std::size_t page = 4096;
  std::size_t at = 0;
  volatile std::byte sink{};
  for (const gguf::TensorInfo* t : resident_) {
    const std::size_t from = std::max(begin, at), to = std::min(end, at + t->n_bytes);
    if (from < to) {
      file_->files()[static_cast<std::size_t>(t->shard)]->advise(
          t->file_offset + (from - at), to - from, gguf::MappedFile::Advice::will_need);
      for (std::size_t i = from - at; i < to - at; i += page) sink = t->data[i];
    }
    at += t->n_bytes;
  }
  (void)sink;
}

void Model::prefetch_rows(const std::vector<std::vector<std::int32_t>>& rows) const {
  constexpr std::size_t worth_asking = std::size_t{256}
                                       << 20;  // bytes; smaller tables stay in the page cache
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Table& t = tables_[i];
    if (t.file == nullptr || t.bytes < worth_asking) continue;
    for (const std::int32_t row : rows[i])
      t.file->advise(t.offset + static_cast<std::size_t>(row) * t.weight.row_bytes,
                     t.weight.row_bytes, gguf::MappedFile::Advice::will_need);
  }
}

}  // namespace imp
