// The header reader of qwen4exp: every limit at its edge and one beyond, every contradiction.
#include "cpp/model/hparams.h"

#include <doctest/doctest.h>

#include <limits>

#include "cpp/model/qwen4_exp.h"
#include "tests/cpp/errors.h"
#include "tests/cpp/tiny_model.h"

namespace imp {
namespace {

using test::Header;
using test::refused;
using test::tiny_header;

void unsupported(const Header& h, const std::vector<std::string>& parts) {
  refused([&] { h.read(); }, ErrorCode::unsupported, parts);
}
void bad(const Header& h, const std::vector<std::string>& parts) {
  refused([&] { h.read(); }, ErrorCode::bad_file, parts);
}

}  // namespace

TEST_CASE("a header is read") {
  const HParams h = tiny_header().read();
  CHECK(h.arch == "qwen4exp");
  CHECK(h.vocab == 32);
  CHECK(h.layers == 4);
  CHECK(h.mtp_layers == 0);
  CHECK(h.recurrent == std::vector<bool>{true, true, true, false});
  CHECK(h.wide() == 32);
  CHECK(h.attention.rotary_dim == 4);
  CHECK(h.attention.rope_theta == 1e6);
  REQUIRE(h.attention.indexer);
  CHECK(h.attention.indexer->ratio == 4);
  CHECK(h.attention.indexer->blocks() == 2);
  CHECK(h.delta.value_dim == 8);
  CHECK(h.delta.channels() == 32);
  CHECK(h.delta.gate == Act::sigmoid);
  CHECK(h.moe.renormalise);
  REQUIRE(h.ngram);
  CHECK(h.ngram->heads() == 4);
  CHECK(h.ngram->layers.at(0).offsets == std::vector<std::uint64_t>{0, 11, 24, 41});
  CHECK(h.notes.empty());
}

TEST_CASE("every needed key: missing, zero, of the wrong type") {
  for (const char* name : {"embedding_length",
                           "block_count",
                           "context_length",
                           "attention.head_count",
                           "attention.head_count_kv",
                           "attention.key_length",
                           "attention.value_length",
                           "rope.dimension_count",
                           "attention.indexer.key_length",
                           "attention.indexer.top_k",
                           "ssm.conv_kernel",
                           "ssm.group_count",
                           "ssm.time_step_rank",
                           "ssm.state_size",
                           "ssm.inner_size",
                           "hyper_connection.count",
                           "hyper_connection.low_rank",
                           "expert_count",
                           "expert_used_count",
                           "expert_feed_forward_length",
                           "expert_shared_feed_forward_length",
                           "ple.ngram_size",
                           "ple.heads_per_ngram",
                           "ple.conv_kernel",
                           "embedding_length_per_layer_input"}) {
    CAPTURE(name);
    const std::string key = Header::full(name);
    bad(tiny_header().without(name), {key, "missing"});
    unsupported(tiny_header().number(name, 0), {key, "is 0", "1 to"});
    unsupported(tiny_header().number(name, -7), {key, "is -7", "1 to"});
    bad(tiny_header().text(name, "many"), {key, "string", "integer"});
  }
  for (const char* name : {"attention.layer_norm_rms_epsilon", "rope.freq_base"}) {
    bad(tiny_header().without(name), {Header::full(name), "missing"});
    bad(tiny_header().text(name, "x"), {Header::full(name), "string"});
  }
  bad(tiny_header().without("ple.eos_token_id"), {"ple.eos_token_id", "missing"});
}

TEST_CASE("every size at its limit and one beyond") {
  struct Limit {
    const char* name;
    std::int64_t most;
    void (*fit)(Header&);  // what else has to change for `most` to be consistent
  };
  const auto alone = [](Header&) {};
  const Limit limits[] = {
      {"vocab_size", max_vocab, alone},
      {"embedding_length", max_width / 2, alone},  // two streams of it make the widest row
      {"block_count", max_layers, alone},
      {"context_length", std::int64_t{1} << 31, alone},
      {"attention.head_count", max_width, alone},
      {"attention.head_count_kv", max_width,
       [](Header& h) { h.number("attention.head_count", max_width); }},
      {"attention.key_length", max_width,
       [](Header& h) { h.number("attention.value_length", max_width); }},
      {"attention.indexer.head_count", max_width, alone},
      {"attention.indexer.key_length", max_width, alone},
      {"attention.indexer.top_k", std::int64_t{1} << 31, alone},
      {"ssm.conv_kernel", max_conv_kernel, alone},
      {"ssm.state_size", max_width, alone},
      {"ssm.inner_size", max_width, alone},
      {"ssm.time_step_rank", max_width, [](Header& h) { h.number("ssm.inner_size", max_width); }},
      {"ssm.group_count", max_width,
       [](Header& h) {
         h.number("ssm.inner_size", max_width).number("ssm.time_step_rank", max_width);
       }},
      {"hyper_connection.count", max_streams, alone},
      {"hyper_connection.low_rank", max_width, alone},
      {"expert_count", max_experts, alone},
      {"expert_used_count", max_experts, [](Header& h) { h.number("expert_count", max_experts); }},
      {"expert_feed_forward_length", max_width, alone},
      {"expert_shared_feed_forward_length", max_width, alone},
      {"ple.conv_kernel", max_conv_kernel, alone},
      {"embedding_length_per_layer_input", max_width, alone},
  };
  for (const Limit& l : limits) {
    CAPTURE(l.name);
    Header at = tiny_header();
    l.fit(at);
    at.number(l.name, l.most);
    CHECK_NOTHROW(at.read());
    Header beyond = tiny_header();
    l.fit(beyond);
    beyond.number(l.name, l.most + 1);
    if (std::string(l.name) == "embedding_length")
      unsupported(beyond, {"residual width", str(max_width + 2), str(max_width)});
    else
      unsupported(beyond, {Header::full(l.name), str(l.most + 1), str("1 to ", l.most)});
  }
  unsupported(tiny_header().number("embedding_length", max_width + 1), {"embedding_length"});
}

TEST_CASE("the vocabulary may be counted from the tokenizer") {
  Header h = tiny_header().without("vocab_size");
  bad(h, {"qwen4exp.vocab_size", "tokenizer.ggml.tokens"});
  h.texts(":tokenizer.ggml.tokens", std::vector<std::string>(7, "x"));
  CHECK(h.read().vocab == 7);
  unsupported(h.texts(":tokenizer.ggml.tokens", {}), {"vocabulary of 0", str(max_vocab)});
}

TEST_CASE("layers") {
  CHECK(tiny_header().number("nextn_predict_layers", 1).read().layers == 3);
  CHECK(tiny_header().number("nextn_predict_layers", 1).read().mtp_layers == 1);
  unsupported(tiny_header().number("nextn_predict_layers", 2), {"2 MTP layers of 4"});
  unsupported(tiny_header().number("nextn_predict_layers", -1), {"-1 MTP layers"});
  unsupported(tiny_header().number("block_count", 1).number("nextn_predict_layers", 1),
              {"1 MTP layers of 1"});
  Header flags = tiny_header().flags("attention.recurrent_layers", {1, 0, 1, 1, 0});
  CHECK(flags.read().recurrent == std::vector<bool>{true, false, true, true});
  unsupported(tiny_header().flags("attention.recurrent_layers", {1, 0, 1}),
              {"attention.recurrent_layers", "3 entries", "4 layers"});
  CHECK(tiny_header().number("full_attention_interval", 1).read().recurrent ==
        std::vector<bool>(4, false));
  CHECK(tiny_header().number("full_attention_interval", max_layers).read().recurrent ==
        std::vector<bool>(4, true));
  unsupported(tiny_header().number("full_attention_interval", max_layers + 1),
              {"full_attention_interval", str(max_layers + 1)});
}

TEST_CASE("numbers that fit together") {
  unsupported(tiny_header().real("attention.layer_norm_rms_epsilon", 1.0), {"norm epsilon 1"});
  unsupported(tiny_header().real("attention.layer_norm_rms_epsilon", -1e-6), {"norm epsilon"});
  unsupported(tiny_header().real("attention.layer_norm_rms_epsilon",
                                 std::numeric_limits<double>::quiet_NaN()),
              {"norm epsilon nan"});
  CHECK_NOTHROW(tiny_header().real("attention.layer_norm_rms_epsilon", 0).read());
  unsupported(tiny_header().number("attention.value_length", 4), {"key and value lengths"});
  unsupported(tiny_header().number("attention.head_count", 3).number("attention.head_count_kv", 2),
              {"3 query heads", "2 KV heads"});
  unsupported(tiny_header().number("rope.dimension_count", 10), {"rotary dimension 10", "8"});
  unsupported(tiny_header().number("rope.dimension_count", 3), {"rotary dimension 3", "8"});
  CHECK(tiny_header().number("rope.dimension_count", 8).read().attention.rotary_dim == 8);
  unsupported(tiny_header().real("rope.freq_base", 1.0), {"rope base 1"});
  unsupported(tiny_header().number("ssm.inner_size", 15), {"inner size 15", "2 heads"});
  unsupported(tiny_header().number("ssm.group_count", 3), {"2 value heads", "3"});
  unsupported(tiny_header().number("hyper_connection.count", 1), {"at least 2"});
  unsupported(tiny_header().number("expert_used_count", 5), {"5 experts used of 4"});
  CHECK(tiny_header().number("expert_used_count", 4).read().moe.used == 4);
}

TEST_CASE("one number for all layers, or an array of equal ones") {
  for (const char* name : {"attention.head_count", "attention.head_count_kv",
                           "expert_feed_forward_length", "expert_shared_feed_forward_length"}) {
    CAPTURE(name);
    CHECK_NOTHROW(
        tiny_header().numbers(name, {2, 2, 2, 2}).number("attention.head_count", 2).read());
    unsupported(tiny_header().numbers(name, {2, 2, 1, 2}), {Header::full(name), "2 and 1"});
    bad(tiny_header().numbers(name, {}), {Header::full(name), "empty"});
    unsupported(tiny_header().numbers(name, {0, 0}), {Header::full(name), "is 0"});
  }
}

TEST_CASE("the indexer is absent or whole") {
  CHECK_FALSE(tiny_header().without("attention.indexer.head_count").read().attention.indexer);
  const HParams zeros = tiny_header().numbers("attention.compress_ratios", {0, 0, 0, 0}).read();
  CHECK(zeros.attention.indexer->ratio == 4);
  CHECK(zeros.notes.size() == 1);
  CHECK(tiny_header().without("attention.compress_ratios").read().notes.size() == 1);
  // Ratios of delta-net layers do not count.
  CHECK(tiny_header()
            .numbers("attention.compress_ratios", {9, 9, 9, 8})
            .read()
            .attention.indexer->ratio == 8);
  Header two = tiny_header().number("full_attention_interval", 2);
  unsupported(two.numbers("attention.compress_ratios", {0, 4, 0, 8}), {"ratios 4 and 8"});
  Header at = tiny_header().numbers("attention.compress_ratios", {0, 0, 0, max_index_ratio});
  CHECK_NOTHROW(at.number("attention.indexer.top_k", 4 * max_index_ratio).read());
  unsupported(tiny_header().numbers("attention.compress_ratios", {0, 0, 0, max_index_ratio + 1}),
              {str("ratio ", max_index_ratio + 1), str("1 to ", max_index_ratio)});
  unsupported(tiny_header().numbers("attention.compress_ratios", {0, 0, 0, -4}), {"ratio -4"});
  unsupported(tiny_header().number("attention.indexer.top_k", 10), {"budget 10", "ratio 4"});
  unsupported(tiny_header().number("attention.indexer.key_length", 3), {"key length 3", "4"});
  CHECK_NOTHROW(tiny_header().number("attention.indexer.key_length", 4).read());
}

TEST_CASE("activations by name") {
  CHECK(tiny_header().text("imp.output_gate_type", "silu").read().delta.gate == Act::silu);
  CHECK(tiny_header().text("imp.output_gate_type", "swish").read().delta.gate == Act::silu);
  CHECK(tiny_header().text("imp.output_gate_type", "sigmoid").read().delta.gate == Act::sigmoid);
  unsupported(tiny_header().text("imp.output_gate_type", "gelu"), {"output_gate_type", "gelu"});
  CHECK_NOTHROW(tiny_header().text("imp.hidden_act", "silu").read());
  unsupported(tiny_header().text("imp.hidden_act", "relu"), {"hidden_act", "relu"});
  CHECK_FALSE(tiny_header().flag("imp.norm_topk_prob", false).read().moe.renormalise);
}

TEST_CASE("the n-gram block") {
  CHECK_FALSE(tiny_header().without("ple.layers").read().ngram);
  CHECK_FALSE(tiny_header().numbers("ple.layers", {}).read().ngram);
  unsupported(tiny_header().numbers("ple.layers", {4}), {"n-gram layer 4 of 4"});
  unsupported(tiny_header().numbers("ple.layers", {-1}), {"n-gram layer -1"});
  CHECK_NOTHROW(tiny_header().numbers("ple.layers", {3}).read());

  // n-grams of 8 with 9 heads each: 63 heads; 10 each would be 70.
  const auto sized = [](std::int64_t size, std::int64_t per) {
    const auto heads = static_cast<std::size_t>((size - 1) * per);
    Header h = tiny_header().number("ple.ngram_size", size).number("ple.heads_per_ngram", per);
    h.numbers("ple.layer_multipliers",
              std::vector<std::int64_t>(static_cast<std::size_t>(size), 3));
    h.numbers("ple.head_vocab_sizes", std::vector<std::int64_t>(heads, 5));
    return h.numbers("ple.head_offsets", std::vector<std::int64_t>(heads, 0));
  };
  CHECK(sized(max_ngram_size, 9).read().ngram->heads() == 63);
  CHECK(sized(2, max_ngram_heads).read().ngram->heads() == max_ngram_heads);
  unsupported(sized(max_ngram_size + 1, 1), {"ple.ngram_size", str(max_ngram_size + 1)});
  unsupported(sized(max_ngram_size, 10), {"70 n-gram heads", str(max_ngram_heads)});
  unsupported(sized(2, max_ngram_heads + 1), {"ple.heads_per_ngram", str(max_ngram_heads + 1)});
  unsupported(tiny_header().number("ple.ngram_size", 1), {"n-gram size 1", "2"});

  unsupported(tiny_header().number("ple.eos_token_id", 32), {"boundary token 32", "32"});
  unsupported(tiny_header().number("ple.eos_token_id", -1), {"boundary token -1"});
  CHECK(tiny_header().number("ple.eos_token_id", 31).read().ngram->boundary_token == 31);

  for (const char* name : {"ple.layer_multipliers", "ple.head_vocab_sizes", "ple.head_offsets"}) {
    unsupported(tiny_header().numbers(name, {1, 2}), {Header::full(name), "2 entries"});
    unsupported(tiny_header().without(name), {Header::full(name), "0 entries"});
  }
  bad(tiny_header().numbers("ple.layer_multipliers", {1, -2, 3}), {"ple.layer_multipliers", "-2"});
  unsupported(tiny_header().numbers("ple.head_vocab_sizes", {11, 0, 17, 19}),
              {"head 1", "empty vocabulary"});
  constexpr std::int64_t most_rows = 0x7fffffff;
  CHECK_NOTHROW(tiny_header().numbers("ple.head_offsets", {0, 11, 24, most_rows - 19}).read());
  unsupported(tiny_header().numbers("ple.head_offsets", {0, 11, 24, most_rows - 18}),
              {"head 3", str(most_rows + 1), str(most_rows)});

  Header two = tiny_header().numbers("ple.layers", {1, 3});
  unsupported(two, {"ple.layer_multipliers", "3 entries, 6"});
  two.numbers("ple.layer_multipliers", {1, 2, 3, 4, 5, 6});
  two.numbers("ple.head_vocab_sizes", {11, 13, 17, 19, 5, 5, 5, 5});
  two.numbers("ple.head_offsets", {0, 11, 24, 41, 0, 5, 10, 15});
  CHECK(two.read().ngram->layers.at(1).multipliers == std::vector<std::uint64_t>{4, 5, 6});
  CHECK(two.read().ngram->layers.at(1).offsets == std::vector<std::uint64_t>{0, 5, 10, 15});
  unsupported(two.numbers("ple.layers", {3, 1}), {"ascending"});
}

TEST_CASE("the tensor table follows the header") {
  const auto has = [](const std::vector<TensorSpec>& specs, const std::string& name) {
    for (const TensorSpec& s : specs)
      if (s.name == name) return true;
    return false;
  };
  const auto table = find_arch("qwen4exp")->tensors(tiny_header().read());
  CHECK(has(table, "blk.3.indexer.k_proj.weight"));
  CHECK(has(table, "blk.0.ssm_out.weight"));
  CHECK(has(table, "per_layer_token_embd.weight"));
  const auto plain =
      find_arch("qwen4exp")
          ->tensors(
              tiny_header().without("ple.layers").without("attention.indexer.head_count").read());
  CHECK_FALSE(has(plain, "blk.3.indexer.k_proj.weight"));
  CHECK_FALSE(has(plain, "per_layer_token_embd.weight"));
  CHECK(find_arch("llama") == nullptr);
  CHECK(scale_name("blk.3.ffn_up_exps.weight") == "blk.3.ffn_up_exps.scale");
}

}  // namespace imp
