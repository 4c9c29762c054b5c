// A GGUF image in address space: a true header, and tensor data that is written only where the host
// reads it. The loader binds and checks it like any file.
#include "cpp/model/synthetic.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "cpp/core/buffer.h"
#include "cpp/core/error.h"
#include "cpp/core/sysinfo.h"
#include "cpp/core/threads.h"
#include "cpp/model/synthetic_words.h"

namespace imp {
namespace {

using gguf::ValueType;

struct Shape {
  std::int64_t layers = 48, experts = 512, vocab = 248320, table = 1 << 20, seed = 1;
  DType dense = DType::bf16;
};

Shape read_spec(const std::string& spec) {
  Shape s;
  struct Key {
    std::int64_t* value;
    std::int64_t least, most;
  };
  const std::map<std::string, Key, std::less<>> keys = {
      {"layers", {&s.layers, 1, max_layers}},
      {"experts", {&s.experts, 1, max_experts}},
      {"vocab", {&s.vocab, 1, max_vocab}},
      {"table", {&s.table, 16, 320001536}},
      {"seed", {&s.seed, 0, std::int64_t{1} << 40}}};
  const auto bad = [&](const std::string& why) {
    fail(ErrorCode::invalid_argument, str("synthetic model '", spec, "': ", why));
  };
  const std::size_t colon = std::min(spec.find(':'), spec.size());
  if (spec.substr(0, colon) != "flash-next") bad("the shapes are: flash-next");
  std::string_view rest = std::string_view(spec).substr(std::min(spec.size(), colon + 1));
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
    const std::size_t equals = item.find('=');
    if (item.substr(0, equals) == "dense" && equals != std::string_view::npos) {
      const std::string_view type = item.substr(equals + 1);
      if (type != "bf16" && type != "q8_0")
        bad(str("dense is '", type, "', bf16 or q8_0 is needed"));
      s.dense = type == "bf16" ? DType::bf16 : DType::q8_0;
      continue;
    }
    const auto key = keys.find(item.substr(0, equals));
    if (equals == std::string_view::npos || key == keys.end())
      bad(str("'", item, "' is not one of layers=, experts=, vocab=, table=, seed=, dense="));
    const std::string_view number = item.substr(equals + 1);
    const auto [value, least, most] = key->second;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), *value);
    if (error != std::errc() || end != number.data() + number.size() || *value < least ||
        *value > most)
      bad(str(key->first, " is '", number, "', a number from ", least, " to ", most, " is needed"));
  }
  return s;
}

class Header {
 public:
  void number(const char* name, std::int64_t v) { set(name, {ValueType::i64, v}); }
  void real(const char* name, double v) { set(name, {ValueType::f64, v}); }
  void numbers(const char* name, std::vector<std::int64_t> v) {
    set(name, {ValueType::array, gguf::Array{ValueType::i64, std::move(v)}});
  }
  const gguf::KeyValues& keys() const { return keys_; }

 private:
  void set(const char* name, gguf::Value v) { keys_.set(str("qwen4exp.", name), std::move(v)); }
  gguf::KeyValues keys_;
};

gguf::KeyValues flash_next(const Shape& s) {
  Header h;
  h.number("block_count", s.layers);
  h.number("context_length", 262144);
  h.number("embedding_length", 2560);
  h.number("vocab_size", s.vocab);
  h.number("attention.head_count", 24);
  h.number("attention.head_count_kv", 2);
  h.number("attention.key_length", 256);
  h.number("attention.value_length", 256);
  h.real("attention.layer_norm_rms_epsilon", 1e-6);
  h.number("rope.dimension_count", 64);
  h.real("rope.freq_base", 1e7);
  h.number("expert_count", s.experts);
  h.number("expert_used_count", std::min<std::int64_t>(10, s.experts));
  h.number("expert_feed_forward_length", 640);
  h.number("expert_shared_feed_forward_length", 640);
  h.number("ssm.conv_kernel", 4);
  h.number("ssm.state_size", 128);
  h.number("ssm.group_count", 16);
  h.number("ssm.time_step_rank", 48);
  h.number("ssm.inner_size", 6144);
  h.number("full_attention_interval", 4);
  std::vector<std::int64_t> ratios;
  for (std::int64_t l = 0; l < s.layers; ++l) ratios.push_back(l % 4 == 3 ? 4 : 0);
  h.numbers("attention.compress_ratios", ratios);
  h.number("hyper_connection.count", 4);
  h.number("hyper_connection.low_rank", 320);
  h.number("attention.indexer.head_count", 4);
  h.number("attention.indexer.key_length", 128);
  h.number("attention.indexer.top_k", 2048);
  if (s.layers < 2) return h.keys();
  constexpr std::int64_t heads = 16;
  const std::int64_t rows = s.table / heads;
  h.numbers("ple.layers", {1});
  h.number("ple.ngram_size", 3);
  h.number("ple.heads_per_ngram", heads / 2);
  h.number("ple.conv_kernel", 4);
  h.number("ple.eos_token_id", std::min<std::int64_t>(248044, s.vocab - 1));
  h.number("embedding_length_per_layer_input", 160);
  h.numbers("ple.layer_multipliers", {15485863 * 3, 32452843 * 5, 49979687 * 7});
  std::vector<std::int64_t> offsets;
  for (std::int64_t i = 0; i < heads; ++i) offsets.push_back(i * rows);
  h.numbers("ple.head_vocab_sizes", std::vector<std::int64_t>(heads, rows));
  h.numbers("ple.head_offsets", offsets);
  return h.keys();
}

// How a tensor gets its contents: from its seed, or by this, element by element.
using Rule = std::function<float(float uniform)>;  // of a number within +-1

struct Item {
  std::string name;
  std::vector<std::int64_t> dims;
  DType type;
  Rule rule;
  Role role = Role::vector;
  std::size_t offset = 0;

  std::int64_t elements() const {
    std::int64_t n = 1;
    for (const std::int64_t d : dims) n *= d;
    return n;
  }
  std::size_t bytes() const {
    return row_bytes(type, dims[0]) * static_cast<std::size_t>(elements() / dims[0]);
  }
};

Rule vector_rule(std::string_view name) {
  if (name.find("norm") != name.npos) return [](float u) { return 1 + 0.1f * u; };
  if (name.ends_with("ssm_a")) return [](float u) { return -0.525f + 0.475f * u; };
  return [](float u) { return 0.5f * u; };  // filters and biases
}

std::vector<Item> items_of(const std::vector<TensorSpec>& specs, DType dense) {
  constexpr float code_rms = 3.66f;  // of uniform E2M1 codes times their scales
  std::vector<Item> items;
  for (const TensorSpec& spec : specs) {
    const auto constant = [&](const std::string& name, std::int64_t n, float value) {
      items.push_back({name, {n}, DType::f32, [value](float) { return value; }});
    };
    switch (spec.role) {
      case Role::vector:
      case Role::filter:
        items.push_back({spec.name, spec.dims, DType::f32, vector_rule(spec.name)});
        break;
      case Role::router:
        items.push_back({spec.name, spec.dims, DType::f32, {}});
        break;
      case Role::matrix:
      case Role::embedding:
        items.push_back({spec.name, spec.dims, dense, {}, spec.role});
        break;
      case Role::experts:
        items.push_back({spec.name, spec.dims, DType::nvfp4, {}});
        constant(scale_name(spec.name), spec.dims[2],
                 1 / (code_rms * std::sqrt(static_cast<float>(spec.dims[0]))));
        break;
      case Role::table:
        items.push_back({spec.name + "_e4m3", spec.dims, DType::i8, {}, spec.role});
        constant(scale_name(spec.name), 1, 0.02f);
    }
  }
  return items;
}

class Image {
 public:
  Image(const gguf::KeyValues& keys, std::vector<Item>& items) {
    write("GGUF", 4);
    put(gguf::max_version);
    put(static_cast<std::uint64_t>(items.size()));
    put(static_cast<std::uint64_t>(keys.map().size() + 1));
    text("general.architecture");
    put(ValueType::string);
    text("qwen4exp");
    for (const auto& [key, value] : keys.map()) {
      text(key);
      put(value.type);
      if (value.type == ValueType::f64) {
        put(std::get<double>(value.data));
      } else if (value.type == ValueType::i64) {
        put(std::get<std::int64_t>(value.data));
      } else {
        const auto& numbers =
            std::get<std::vector<std::int64_t>>(std::get<gguf::Array>(value.data).data);
        put(ValueType::i64);
        put(static_cast<std::uint64_t>(numbers.size()));
        for (const std::int64_t n : numbers) put(n);
      }
    }
    std::size_t at = 0;
    for (Item& item : items) {
      text(item.name);
      put(static_cast<std::uint32_t>(item.dims.size()));
      for (const std::int64_t d : item.dims) put(d);
      put(item.type);
      put(static_cast<std::uint64_t>(at));
      item.offset = at;
      at = aligned(at + item.bytes());
    }
    data_ = aligned(bytes_.size());
    total_ = data_ + at;
  }
  const std::string& header() const { return bytes_; }
  std::size_t data() const { return data_; }
  std::size_t total() const { return total_; }

 private:
  static std::size_t aligned(std::size_t n) {
    return (n + gguf::default_alignment - 1) / gguf::default_alignment * gguf::default_alignment;
  }
  void write(const void* p, std::size_t n) { bytes_.append(static_cast<const char*>(p), n); }
  template <class T>
  void put(T v) {
    write(&v, sizeof v);
  }
  void text(std::string_view s) {
    put(static_cast<std::uint64_t>(s.size()));
    write(s.data(), s.size());
  }
  std::string bytes_;
  std::size_t data_ = 0, total_ = 0;
};

std::uint64_t seed_of(std::string_view name, std::int64_t seed) {
  std::uint64_t h = synthetic_hash(static_cast<std::uint64_t>(seed), 0);
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return h | 1;  // 0 means that the bytes are there
}

// Words [first, first + n) of a tensor without a rule.
void fill_words(const Item& item, std::uint64_t seed, std::size_t first, std::size_t n,
                std::byte* to) {
  synthetic_words(item.type, seed, item.dims[0], first, n, to);
}

void fill(const Item& item, std::uint64_t seed, std::byte* to) {
  if (item.rule) {
    auto* values = reinterpret_cast<float*>(to);
    for (std::int64_t i = 0; i < item.elements(); ++i) {
      const auto bits = synthetic_word(DType::f32, seed, 1, static_cast<std::uint64_t>(i));
      float uniform;
      std::memcpy(&uniform, &bits, 4);
      values[i] = item.rule(uniform);
    }
    return;
  }
  fill_words(item, seed, 0, item.bytes() / 4, to);
}

[[noreturn]] void refuse(const std::string& path) {
  fail(ErrorCode::io, str("cannot write ", path, ": ", std::strerror(errno)));
}

void write_table(const Item& item, std::uint64_t seed, const std::string& path) {
  constexpr std::size_t part_bytes = std::size_t{4} << 20;
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) refuse(path);
  const std::shared_ptr<void> closing(nullptr, [file](void*) { ::close(file); });
  ThreadPool team(std::clamp(usable_processors(), 1, 16));
  const std::size_t bytes = item.bytes();
  team.parallel_for(
      static_cast<std::int64_t>((bytes + part_bytes - 1) / part_bytes), [&](std::int64_t i, int) {
        const std::size_t first = static_cast<std::size_t>(i) * part_bytes,
                          size = std::min(part_bytes, bytes - first);
        std::vector<std::byte> part(size);
        fill_words(item, seed, first / 4, size / 4, part.data());
        for (std::size_t done = 0; done < size;) {
          const ssize_t n =
              ::pwrite(file, part.data() + done, size - done, static_cast<off_t>(first + done));
          if (n < 0) refuse(path);
          done += static_cast<std::size_t>(n);
        }
      });
}

std::shared_ptr<const gguf::MappedFile> map_table(const Item& item, std::uint64_t seed,
                                                  const std::string& path) {
  if (::access(path.c_str(), F_OK) != 0) {
    const std::string partial = path + ".partial";
    write_table(item, seed, partial);
    if (std::rename(partial.c_str(), path.c_str()) != 0) refuse(path);
  }
  auto file = gguf::MappedFile::open(path);
  const std::span<const std::byte> held = file->bytes();
  if (held.size() != item.bytes())
    fail(ErrorCode::invalid_argument,
         str(path, " has ", held.size(), " bytes, the n-gram table ", item.bytes()));
  std::vector<std::byte> row(static_cast<std::size_t>(item.dims[0]));
  for (const std::size_t first : {std::size_t{0}, item.bytes() - row.size()}) {
    fill_words(item, seed, first / 4, row.size() / 4, row.data());
    if (std::memcmp(row.data(), held.data() + first, row.size()) != 0)
      fail(ErrorCode::invalid_argument, str(path, " holds the n-gram table of another model"));
  }
  file->advise(0, held.size(), gguf::MappedFile::Advice::random);
  return file;
}

}  // namespace

std::shared_ptr<const Model> make_synthetic(const std::string& spec, bool on_host,
                                            const std::string& table_file) {
  const Shape shape = read_spec(spec);
  const gguf::KeyValues keys = flash_next(shape);
  const Arch& arch = *find_arch("qwen4exp");
  std::vector<Item> items = items_of(arch.tensors(arch.read(keys)), shape.dense);
  const Image image(keys, items);

  std::size_t needed = 0;
  const auto in_file = [&](const Item& i) { return i.role == Role::table && !table_file.empty(); };
  const auto here = [&](const Item& i) {
    return (on_host || i.rule || i.role == Role::table) && !in_file(i);
  };
  for (const Item& item : items)
    if (here(item)) needed += item.bytes();
  const MemoryInfo memory = memory_info();
  if (static_cast<std::int64_t>(needed) > memory.available_bytes)
    fail(ErrorCode::out_of_memory,
         str("synthetic model '", spec, "' needs ", needed, " bytes, ", memory.available_bytes,
             " are available (", memory.limited_by, ")"));

  auto arena = std::make_shared<Buffer>(image.total(), "a synthetic model");
  std::memcpy(arena->data(), image.header().data(), image.header().size());
  for (const Item& item : items)
    if (here(item))
      fill(item, seed_of(item.name, shape.seed), arena->data() + image.data() + item.offset);

  const auto name = str("synthetic ", spec);
  auto model = Model::bind(gguf::Gguf::parse({arena->data(), image.total()}, name), arena, {});
  model->notes_.push_back("weights: synthetic");
  model->synthetic_seed_ = shape.seed;
  if (!table_file.empty()) {
    if (model->tables_.empty())
      fail(ErrorCode::invalid_argument, str(name, " has no n-gram table for ", table_file));
    const Item& item = *std::ranges::find_if(items, in_file);
    Model::Table& table = model->tables_.front();
    table.file = map_table(item, seed_of(item.name, shape.seed), table_file);
    const std::byte* was = std::exchange(table.weight.data, table.file->bytes().data());
    for (auto& [_, w] : model->weights_)
      if (w.data == was) w.data = table.weight.data;
    model->notes_.push_back(str("n-gram table: ", table.bytes, " bytes of ", table_file));
  }
  if (on_host) return model;
  for (const Item& item : items) {
    if (here(item) || in_file(item)) continue;
    const std::uint64_t seed = seed_of(item.name, shape.seed);
    if (const auto w = model->weights_.find(item.name); w != model->weights_.end())
      w->second.seed = seed;
    if (const auto b = model->banks_.find(item.name); b != model->banks_.end())
      b->second.expert.seed = seed;
  }
  return model;
}

}  // namespace imp
