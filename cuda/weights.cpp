// Upload in slices; block formats pass through a staging buffer where they are split.
#include "cuda/weights.h"

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "cpp/core/error.h"
#include "cuda/watchdog.h"

namespace imp::cuda {
namespace {

constexpr std::size_t staging_bytes = std::size_t{64} << 20;
constexpr std::size_t alignment = 256;

bool has_kernels(DType type) {
  switch (type) {
    case DType::f32:
    case DType::f16:
    case DType::bf16:
    case DType::f8_e4m3:
    case DType::q8_0:
    case DType::nvfp4:
      return true;
    default:
      return false;
  }
}

// A unit past the end may be loaded, never used.
std::size_t aligned(std::size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

// Of `parts` matrices, as upload() takes them.
std::size_t packed_bytes(const Weight& w, std::int64_t parts) {
  const std::size_t bytes = static_cast<std::size_t>(w.rows * parts) * w.row_bytes;
  const BlockShape shape = block_shape(w.dtype);
  if (shape.block_bytes == 0) return aligned(bytes);
  const std::size_t blocks = bytes / shape.block_bytes;
  return aligned(blocks * (shape.block_bytes - shape.scale_bytes)) +
         aligned(blocks * shape.scale_bytes);
}

template <class Map>
const auto& lookup(const Map& map, const void* key, const char* what) {
  const auto it = map.find(key);
  if (it == map.end()) fail(ErrorCode::internal, str("a ", what, " was not uploaded"));
  return it->second;
}

using Lock = std::lock_guard<std::mutex>;

}  // namespace

std::byte* WeightStore::take(std::size_t bytes, const char* what) {
  bytes = aligned(bytes);
  if (bytes > left_) {  // outside of add(Graph)
    blocks_.push_back(device_memory(bytes, what));
    bytes_ += bytes;
    return blocks_.back().data();
  }
  std::byte* p = next_;
  next_ += bytes;
  left_ -= bytes;
  return p;
}

std::shared_ptr<const ExpertStore> WeightStore::expert_store(const std::vector<ExpertLayer>& layers,
                                                             std::size_t ram_limit, bool verify) {
  const Lock lock(mutex_);
  auto store = expert_store_.lock();
  if (!store)
    expert_store_ = store =
        std::make_shared<const ExpertStore>(layers, ram_limit, verify, stream_.get());
  if (verify && store->checksums().empty())
    fail(ErrorCode::invalid_argument,
         "experts cannot be verified while a session without verify_experts has read them");
  return store;
}

WeightBytes WeightStore::bytes() const {
  const Lock lock(mutex_);
  const auto experts = expert_store_.lock();
  return {bytes_, experts ? experts->bytes() : 0};
}

const float* WeightStore::factors(const ExpertBank& bank) {
  const Lock lock(mutex_);
  return own_factors(bank);
}

const float* WeightStore::own_factors(const ExpertBank& bank) {
  if (bank.scales == nullptr) return nullptr;
  const Vector v{bank.scales, bank.experts};
  add(v);
  return vectors_.at(v.data);
}

Matrix packed_matrix(const Weight& w, bool tiled) {
  Matrix m;
  m.type = w.dtype;
  m.rows = w.rows;
  m.cols = w.cols;
  m.scale = w.scale;
  m.row_bytes = static_cast<std::int64_t>(w.row_bytes);
  const BlockShape shape = block_shape(w.dtype);
  if (shape.block_bytes == 0) return m;
  m.scale *= tiled ? tiled_missing() : shape.missing;
  m.scale_row_bytes =
      static_cast<std::int64_t>(w.row_bytes / shape.block_bytes * shape.scale_bytes);
  m.row_bytes -= m.scale_row_bytes;
  return m;
}

void pack_blocks(const Weight& w, bool tiled, const std::byte* blocks, std::size_t first,
                 std::size_t n, std::byte* codes, std::byte* scales, cudaStream_t stream) {
  const BlockShape shape = block_shape(w.dtype);
  if (tiled)
    return tile_blocks(blocks, first, n, static_cast<std::int64_t>(w.row_bytes / shape.block_bytes),
                       codes, scales, stream);
  split_blocks(w.dtype, blocks, n, codes + first * (shape.block_bytes - shape.scale_bytes),
               scales + first * shape.scale_bytes, stream);
}

Matrix WeightStore::upload(const Weight& w, std::size_t parts, std::size_t stride, bool tiled) {
  if (!has_kernels(w.dtype))
    fail(ErrorCode::unsupported,
         str("weights of type ", type_info(w.dtype).name, " have no CUDA kernels"));
  Matrix m = packed_matrix(w, tiled);
  const auto rows = static_cast<std::size_t>(w.rows);
  std::size_t part_bytes = rows * w.row_bytes;
  if (stride == part_bytes) {  // one piece
    part_bytes *= parts;
    stride = part_bytes;
    parts = 1;
  }
  const BlockShape shape = block_shape(w.dtype);
  if (shape.block_bytes == 0) {
    std::byte* data = take(parts * part_bytes, "a weight");
    if (w.seed != 0)
      fill_synthetic(w, 0, parts * part_bytes / 4, data, stream_.get());
    else
      for (std::size_t p = 0; p < parts; ++p)
        check(cudaMemcpyAsync(data + p * part_bytes, w.data + p * stride, part_bytes,
                              cudaMemcpyHostToDevice, stream_.get()),
              "cudaMemcpyAsync");
    m.data = data;
  } else {
    const std::size_t blocks = parts * part_bytes / shape.block_bytes,
                      code_bytes = shape.block_bytes - shape.scale_bytes;
    std::byte* codes = take(blocks * code_bytes, "a weight");
    std::byte* scales = take(blocks * shape.scale_bytes, "a weight's scales");
    const std::size_t whole = std::lcm(shape.block_bytes, std::size_t{4});  // blocks and words
    const std::size_t slice = staging_bytes / whole * whole;
    const DeviceMemory staging = device_memory(std::min(slice, part_bytes), "weight staging");
    if (w.seed != 0 && (parts > 1 || part_bytes % whole != 0))
      fail(ErrorCode::internal, "synthetic blocks that are not whole words");
    std::size_t done = 0;
    for (std::size_t p = 0; p < parts; ++p)
      for (std::size_t at = 0; at < part_bytes; at += slice) {
        const std::size_t bytes = std::min(slice, part_bytes - at), n = bytes / shape.block_bytes;
        if (w.seed != 0)
          fill_synthetic(w, at / 4, bytes / 4, staging.data(), stream_.get());
        else
          check(cudaMemcpyAsync(staging.data(), w.data + p * stride + at, bytes,
                                cudaMemcpyHostToDevice, stream_.get()),
                "cudaMemcpyAsync");
        pack_blocks(w, tiled, staging.data(), done, n, codes, scales, stream_.get());
        done += n;
      }
    finish(stream_.get(), "packing a weight");
    m.data = codes;
    m.scales = scales;
  }
  finish(stream_.get(), "copying a weight");
  return m;
}

void WeightStore::add(const Weight* w) {
  const auto it = matrices_.find(w->data);
  if (it == matrices_.end()) {
    matrices_.emplace(w->data, upload(*w, 1, static_cast<std::size_t>(w->rows) * w->row_bytes));
  } else if (it->second.rows != w->rows || it->second.cols != w->cols ||
             it->second.type != w->dtype) {
    fail(ErrorCode::internal, "one weight with two shapes");
  }
}

void WeightStore::add(const ExpertBank* bank) {
  if (experts_.contains(bank->expert.data)) return;
  Experts e;
  e.tiled = can_tile(bank->expert);
  e.expert =
      upload(bank->expert, static_cast<std::size_t>(bank->experts), bank->expert_bytes, e.tiled);
  e.experts = bank->experts;
  e.bytes = e.expert.rows * e.expert.row_bytes;
  e.scale_bytes = e.expert.rows * e.expert.scale_row_bytes;
  e.factors = own_factors(*bank);
  experts_.emplace(bank->expert.data, e);
}

void WeightStore::add(const Vector& v) {
  if (vectors_.contains(v.data)) return;
  const std::size_t bytes = static_cast<std::size_t>(v.size) * sizeof(float);
  std::byte* p = take(bytes, "a weight");
  check(cudaMemcpyAsync(p, v.data, bytes, cudaMemcpyHostToDevice, stream_.get()),
        "cudaMemcpyAsync");
  finish(stream_.get(), "copying a weight");
  vectors_.emplace(v.data, reinterpret_cast<const float*>(p));
}

const Matrix& WeightStore::matrix(const Weight& w) const {
  const Lock lock(mutex_);
  return lookup(matrices_, w.data, "weight");
}
const Experts& WeightStore::experts(const ExpertBank& b) const {
  const Lock lock(mutex_);
  return lookup(experts_, b.expert.data, "bank of experts");
}
const float* WeightStore::vector(const Vector& v) const {
  const Lock lock(mutex_);
  return lookup(vectors_, v.data, "vector");
}

namespace {

const void* address(const Weight* w) { return w->data; }
const void* address(const ExpertBank* b) { return b->expert.data; }
const void* address(const Vector& v) { return v.data; }

// Calls f with each weight that an op names.
template <class F>
struct Names {
  F f;
  void operator()(const Linear& o) const { f(o.w); }
  void operator()(const GroupNorm& o) const { f(o.w); }
  void operator()(const ConvSilu& o) const { f(o.w); }
  void operator()(const DeltaRule& o) const { f(o.a), f(o.dt); }
  void operator()(const GatedNorm& o) const { f(o.w); }
  void operator()(const HeadNormRope& o) const { f(o.w); }
  void operator()(const IndexKeys& o) const { f(o.w); }
  void operator()(const AttendInputs& o) const {
    f(o.q_norm), f(o.k_norm);
    if (o.index_heads > 0) f(o.index_q_norm), f(o.index_k_norm);
  }
  void operator()(const ExpertFfn& o) const { f(o.gate), f(o.up), f(o.down); }
  void operator()(const NgramGate& o) const { f(o.w_key), f(o.w_query), f(o.w_conv); }
  void operator()(const NgramConv& o) const { f(o.w); }
  void operator()(const Linears& o) const {
    for (const Linears::Part& p : o.parts) f(p.w);
  }
  void operator()(const LinearMix& o) const { f(o.w); }
  void operator()(const InjectNorm& o) const { f(o.w); }
  void operator()(const MoeFfn& o) const { f(o.gate), f(o.up), f(o.down), f(o.shared_down); }
  void operator()(const GatedDeltaNet& o) const { f(o.conv), f(o.a), f(o.dt), f(o.norm); }
  void operator()(const ResidualRead& o) const { f(o.w), f(o.down), f(o.inject), f(o.up); }
  // Without weights, or with a table that stays where it is.
  void operator()(const Feed&) const {}
  void operator()(const EmbedStreams&) const {}
  void operator()(const NgramRows&) const {}
  void operator()(const GatherOutputs&) const {}
  void operator()(const SwiGlu&) const {}
  void operator()(const ResidualMix&) const {}
  void operator()(const ResidualInject&) const {}
  void operator()(const RopeTable&) const {}
  void operator()(const KvStore&) const {}
  void operator()(const IndexSelect&) const {}
  void operator()(const Attend&) const {}
  void operator()(const Route&) const {}
  void operator()(const Combine&) const {}
  void operator()(const Sample&) const {}
};

}  // namespace

std::size_t WeightStore::missing(const Weight* w) const {
  return matrices_.contains(w->data) ? 0 : packed_bytes(*w, 1);
}
std::size_t WeightStore::missing(const ExpertBank* b) const {
  if (experts_.contains(b->expert.data)) return 0;
  const std::size_t factors = b->scales == nullptr ? 0 : missing(Vector{b->scales, b->experts});
  return packed_bytes(b->expert, b->experts) + factors;
}
std::size_t WeightStore::missing(const Vector& v) const {
  return vectors_.contains(v.data) ? 0 : aligned(static_cast<std::size_t>(v.size) * sizeof(float));
}

void WeightStore::add(const Graph& graph, const CachedExperts* cached) {
  const Lock lock(mutex_);
  const auto each = [&](auto f) {
    const Names names{[&](const auto& w) {
      if constexpr (std::is_same_v<decltype(w), const ExpertBank* const&>)
        if (cached != nullptr && cached->find(*w) != nullptr) return;
      f(w);
    }};
    for (const Node& node : graph.nodes()) std::visit(names, node.op);
  };
  std::unordered_map<const void*, std::size_t> needed;  // by host address
  each([&](const auto& w) { needed[address(w)] = missing(w); });
  std::size_t bytes = 0;
  for (const auto& [data, size] : needed) bytes += size;
  if (bytes == 0) return;
  blocks_.push_back(device_memory(bytes, "the weights"));
  bytes_ += bytes;
  next_ = blocks_.back().data();
  left_ = bytes;
  each([this](const auto& w) { add(w); });
  left_ = 0;
}

const Matrix& Context::matrix(const Weight* w) const { return weights->matrix(*w); }
const Experts& Context::experts(const ExpertBank* b) const {
  const Experts* found = cached == nullptr ? nullptr : cached->find(*b);
  return found != nullptr ? *found : weights->experts(*b);
}
const float* Context::vector(const Vector& v) const { return weights->vector(v); }

}  // namespace imp::cuda

namespace imp {

std::shared_ptr<cuda::WeightStore> CudaWeights::store() {
  const std::lock_guard lock(mutex_);
  auto store = store_.lock();
  if (!store) store_ = store = std::make_shared<cuda::WeightStore>();
  return store;
}

WeightBytes CudaWeights::bytes() const {
  const std::lock_guard lock(mutex_);
  const auto store = store_.lock();
  return store ? store->bytes() : WeightBytes{};
}

std::shared_ptr<CudaWeights> make_cuda_weights() { return std::make_shared<CudaWeights>(); }
WeightBytes weight_bytes(const CudaWeights& weights) { return weights.bytes(); }

}  // namespace imp
