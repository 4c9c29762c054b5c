// One GGUF file, or the shards of a split one: `<prefix>-00001-of-00003.gguf`.
#include "cpp/gguf/gguf.h"

#include <cstdio>
#include <filesystem>
#include <optional>

#include "cpp/core/error.h"
#include "cpp/gguf/reader.h"

namespace imp::gguf {
namespace {

constexpr std::string_view no_key = "split.no";                  // 0-based
constexpr std::string_view count_key = "split.count";            // files
constexpr std::string_view tensors_key = "split.tensors.count";  // over all files

std::string shard_suffix(std::int64_t number, std::int64_t count) {
  char text[64];
  std::snprintf(text, sizeof text, "-%05lld-of-%05lld.gguf", static_cast<long long>(number),
                static_cast<long long>(count));
  return text;
}

// As kv.integer, naming the file.
std::optional<std::int64_t> split_key(const Reader& part, const std::string& file,
                                      std::string_view key) {
  try {
    return part.keys.integer(key);
  } catch (const Error& e) {
    fail(e.code(), file + ": " + e.what());
  }
}

void check_shard(const Reader& part, const std::string& file, std::int64_t no, std::int64_t count) {
  for (const auto& [key, wanted] : {std::pair(no_key, no), std::pair(count_key, count)}) {
    const auto value = split_key(part, file, key);
    if (!value) fail(ErrorCode::bad_file, str(file, ": key ", key, " is missing"));
    if (*value != wanted)
      fail(ErrorCode::bad_file,
           str(file, ": key ", key, " is ", *value, ", its place needs ", wanted));
  }
}

void check_total(const std::vector<Reader>& parts, const std::string& file) {
  std::size_t total = 0;
  for (const Reader& part : parts) total += part.tensors.size();
  const auto wanted = split_key(parts.front(), file, tensors_key);
  if (wanted && *wanted != static_cast<std::int64_t>(total))
    fail(ErrorCode::bad_file, str(file, ": key ", tensors_key, " is ", *wanted, ", the ",
                                  parts.size(), " files have ", total, " tensors"));
}

}  // namespace

std::string quote(std::string_view name) {
  constexpr std::size_t most = 96;  // bytes shown
  constexpr std::string_view hex = "0123456789abcdef";
  std::string out = "'";
  for (const char c : name.substr(0, most)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += "\\x";
      out += hex[byte >> 4];
      out += hex[byte & 15];
    }
  }
  if (name.size() > most) out += "...";
  return out + "'";
}

std::int64_t TensorInfo::n_elems() const {
  std::int64_t n = 1;
  for (const std::int64_t d : dims) n *= d;
  return n;
}

const TensorInfo* Gguf::find(std::string_view name) const {
  const auto at = index_.find(std::string(name));
  return at == index_.end() ? nullptr : &tensors_[at->second];
}

std::shared_ptr<const Gguf> Reader::join(std::string path, std::vector<Reader> parts,
                                         std::vector<std::shared_ptr<const MappedFile>> files) {
  const auto out = std::make_shared<Gguf>();
  out->path_ = std::move(path);
  out->version_ = parts.front().version;
  out->keys_ = std::move(parts.front().keys);
  out->files_ = std::move(files);
  for (std::size_t shard = 0; shard < parts.size(); ++shard)
    for (TensorInfo& t : parts[shard].tensors) {
      t.shard = static_cast<int>(shard);
      if (!out->index_.emplace(t.name, out->tensors_.size()).second)
        fail(ErrorCode::bad_file, str(out->files_.empty() ? out->path_ : out->files_[shard]->path(),
                                      ": tensor ", quote(t.name), " is there twice"));
      out->tensors_.push_back(std::move(t));
    }
  return out;
}

std::shared_ptr<const Gguf> Gguf::parse(std::span<const std::byte> bytes, const std::string& name,
                                        const Limits& limits) {
  std::vector<Reader> parts;
  parts.emplace_back(bytes, name, limits);
  return Reader::join(name, std::move(parts), {});
}

std::shared_ptr<const Gguf> Gguf::open(const std::string& path, const Limits& limits) {
  std::vector<std::shared_ptr<const MappedFile>> files;
  std::vector<Reader> parts;
  const auto take = [&](const std::string& file) {
    files.push_back(MappedFile::open(file));
    parts.emplace_back(files.back()->bytes(), file, limits);
  };
  take(path);
  const std::int64_t count = split_key(parts.front(), path, count_key).value_or(1);
  if (count == 1 || count == 0) return Reader::join(path, std::move(parts), std::move(files));
  if (count < 0 || count > limits.shards)
    fail(ErrorCode::unsupported,
         str(path, ": split into ", count, " files, imp opens up to ", limits.shards));
  const std::int64_t no = split_key(parts.front(), path, no_key).value_or(-1);
  if (no < 0 || no >= count)
    fail(ErrorCode::bad_file,
         str(path, ": key ", no_key, " is ", no, ", 0 to ", count - 1, " is possible"));
  const std::string suffix = shard_suffix(no + 1, count);
  if (!path.ends_with(suffix))
    fail(ErrorCode::bad_file,
         str(path, ": file ", no + 1, " of ", count, ", so its name has to end in ", suffix));
  const std::string prefix = path.substr(0, path.size() - suffix.size());
  files.clear();
  parts.clear();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::string file = prefix + shard_suffix(i + 1, count);
    std::error_code ignored;
    if (!std::filesystem::exists(file, ignored))
      fail(ErrorCode::io, str(path, ": file ", i + 1, " of ", count, " is missing: ", file));
    take(file);
    check_shard(parts.back(), file, i, count);
  }
  check_total(parts, files.front()->path());
  return Reader::join(path, std::move(parts), std::move(files));
}

}  // namespace imp::gguf
