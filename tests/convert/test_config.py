"""config.json, tokenizer and metadata: what is read, refused and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from imp_runtime.convert import ConvertError, ConvertOptions, convert, plan
from imp_runtime.convert.config import MAX_LAYERS, read_config
from imp_runtime.convert.ngram import derive
from imp_runtime.convert.tokenizer import pre_tokenizer_name
from tests.convert.builder import Built, build
from tests.convert.read_back import ReadBack
from tests.models import tiny_tokenizer as tok
from tests.models.tiny import ngram_constants


@pytest.fixture(scope="module")
def small() -> Built:
    return build(mtp="")


def with_text(built: Built, **changes: Any) -> Built:
    text = {k: v for k, v in (built.text | changes).items() if v != "absent"}
    return Built(text, built.tensors, {}, dict(built.root), built.prefix)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": "absent"}, "hidden_size is None, a whole number of at least 1 is needed"),
        ({"hidden_size": -4}, "hidden_size is -4, a whole number"),
        ({"hidden_size": True}, "hidden_size is True, a whole number"),
        ({"num_experts": 2.5}, "num_experts is 2.5, a whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', a number is needed"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types has 3 entries for 4 layers"),
        ({"layer_types": ["sliding"] * 4}, "layer_types has the unknown entry 'sliding'"),
        ({"attention_bias": True}, "attention_bias is true, only models without biases"),
        ({"hidden_act": 3}, "hidden_act is 3, a string is needed"),
        ({"hidden_act": "gelu"}, "imp.hidden_act is 'gelu', imp knows silu"),
        ({"ple_layer_ids": [5]}, "ple_layer_ids names layer 5, the model has 1 to 4"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids names layer 0, the model has 1 to 4"),
        ({"ple_embed_dim": 130}, "ple_embed_dim 130 does not divide into 4 heads"),
        ({"indexer_budget": "absent"}, "indexer_budget missing although other indexer values"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2, only 1 is supported"),
        ({"linear_num_value_heads": 7}, "7 is not a multiple of linear_num_key_heads 2"),
        ({"eos_token_id": None}, "eos_token_id is None, the n-gram block needs it"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
        ({"rope_parameters": [1]}, "rope_parameters is [1], an object is needed"),
    ],
)
def test_refused(small: Built, tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    src = with_text(small, **changes).write(tmp_path / "src")
    with pytest.raises(ConvertError) as caught:
        plan(src)
    assert sentence in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("layers", [MAX_LAYERS, MAX_LAYERS + 1])
def test_layer_limit(small: Built, tmp_path: Path, layers: int) -> None:
    changed = with_text(small, num_hidden_layers=layers, layer_types="absent")
    src = changed.write(tmp_path / "src")
    if layers == MAX_LAYERS:
        assert read_config(src).layers == layers
        return
    with pytest.raises(ConvertError, match=f"num_hidden_layers is {layers}, at most {MAX_LAYERS}"):
        read_config(src)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "llama"}', '{"text_config": 1}'])
def test_unreadable_config(small: Built, tmp_path: Path, text: str) -> None:
    src = small.write(tmp_path / "src")
    (src / "config.json").write_text(text)
    with pytest.raises(ConvertError, match="config.json"):
        plan(src)
    (src / "config.json").unlink()
    with pytest.raises(ConvertError, match="config.json is missing"):
        plan(src)


def test_every_spelling_of_attention_layers(small: Built, tmp_path: Path) -> None:
    for kind in ("full_attention", "indexed_attention", "qwen_sparse_attention"):
        types = ["linear_attention"] * 3 + [kind]
        src = with_text(small, layer_types=types).write(tmp_path / kind)
        assert read_config(src).recurrent == (True, True, True, False)
    src = with_text(small, layer_types="absent").write(tmp_path / "interval")
    assert read_config(src).recurrent == (True, True, True, False)


def test_defaults_of_missing_values(small: Built, tmp_path: Path) -> None:
    src = with_text(
        small,
        norm_topk_prob=False,
        output_gate_type="absent",
        rope_parameters={"rope_theta": 5e5},
        eos_token_id=[tok.IM_END, tok.END_OF_TEXT],
    ).write(tmp_path / "src")
    c = read_config(src)
    assert not c.norm_topk_prob
    assert c.output_gate_type == "silu"  # the activation of the model, not sigmoid
    assert c.rotary_dim == c.head_dim  # a missing factor means 1
    assert c.rope_sections == (11, 11, 10, 0)
    assert c.boundary_token == tok.IM_END
    assert "eos_token_id lists" in c.notes[0]


def test_model_keys(tmp_path: Path) -> None:
    built = build(table="fp8", ple_layer_ids=[3, 1], norm_topk_prob=False)
    src = built.write(tmp_path / "src")
    (src / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tok.IM_END, tok.END_OF_TEXT], "top_k": 20, "temperature": 0.7})
    )
    out = tmp_path / "out.gguf"
    convert(src, out)
    back = ReadBack(out)
    text = built.text
    numbers = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "embedding_length": text["hidden_size"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "rope.dimension_count": 8,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 96,
        "attention.indexer.top_k": text["indexer_budget"],
        "ple.eos_token_id": tok.END_OF_TEXT,
        "ple.image_token_id": tok.IMAGE_PAD,
        "embedding_length_per_layer_input": 32,
    }
    for name, value in numbers.items():
        assert back.key(f"qwen4exp.{name}") == value, name
    assert list(back.key("qwen4exp.attention.recurrent_layers")) == [True] * 3 + [False] * 2
    assert list(back.key("qwen4exp.attention.compress_ratios")) == [0, 0, 0, 4, 0]
    assert list(back.key("qwen4exp.ple.layers")) == [0, 2]
    constants = [ngram_constants(text, i) for i in range(2)]
    for name, field in (("layer_multipliers", 0), ("head_vocab_sizes", 1), ("head_offsets", 2)):
        got = [int(v) for v in back.key(f"qwen4exp.ple.{name}")]
        assert got == constants[0][field] + constants[1][field]
        assert back.reader.fields[f"qwen4exp.ple.{name}"].types[-1].name == "UINT64"
    assert back.key("imp.norm_topk_prob") is False
    assert back.key("imp.output_gate_type") == "sigmoid"
    assert back.key("imp.hidden_act") == "silu"
    assert back.key("imp.converter").startswith("imp-runtime")
    assert list(back.key("imp.eos_token_ids")) == [tok.IM_END, tok.END_OF_TEXT]
    assert back.key("general.sampling.top_k") == 20
    assert back.key("general.file_type") == 32
    assert back.key("general.size_label").startswith("12x")


def test_tokenizer_keys(small: Built, tmp_path: Path) -> None:
    src = small.write(tmp_path / "src")
    out = tmp_path / "out.gguf"
    convert(src, out)
    back = ReadBack(out)
    assert back.key("tokenizer.ggml.model") == "gpt2"
    assert back.key("tokenizer.ggml.pre") == "qwen35"
    tokens, types = back.key("tokenizer.ggml.tokens"), list(back.key("tokenizer.ggml.token_type"))
    assert len(tokens) == len(types) == small.text["vocab_size"]
    assert tokens[tok.TOKENS] == f"[PAD{tok.TOKENS}]"
    assert types[tok.TOKENS] == 5
    assert tokens[tok.END_OF_TEXT] == "<|endoftext|>"
    assert types[tok.END_OF_TEXT] == 3
    assert types[0] == 1
    assert len(back.key("tokenizer.ggml.merges")) == len(tok.MERGES)
    assert back.key("tokenizer.ggml.eos_token_id") == tok.IM_END
    assert back.key("tokenizer.ggml.add_bos_token") is False
    assert back.key("tokenizer.chat_template") == tok.CHAT_TEMPLATE


def test_tokenizer_refusals(small: Built, tmp_path: Path) -> None:
    src = small.write(tmp_path / "src")
    path = src / "tokenizer.json"
    parsed = json.loads(path.read_text())
    split = parsed["pre_tokenizer"]["pretokenizers"][0]
    split["pattern"]["Regex"] = r"\w+"
    path.write_text(json.dumps(parsed))
    with pytest.raises(ConvertError, match="name the one to use with --pre"):
        plan(src)
    with plan(src, ConvertOptions(pre="qwen2")) as planned:
        assert planned.writer.kv_data[0]["tokenizer.ggml.pre"].value == "qwen2"
    with pytest.raises(ConvertError, match="--pre nonsense: one of"):
        plan(src, ConvertOptions(pre="nonsense"))
    path.write_text(json.dumps(parsed | {"model": {"type": "Unigram"}}))
    with pytest.raises(ConvertError, match="only BPE tokenizers"):
        plan(src)
    path.write_text("{")
    with pytest.raises(ConvertError, match="tokenizer.json cannot be read"):
        plan(src)
    path.unlink()
    with pytest.raises(ConvertError, match="tokenizer.json is missing"):
        plan(src)


def test_vocabulary_smaller_than_the_tokenizer(small: Built, tmp_path: Path) -> None:
    for vocab, good in ((tok.TOKENS, True), (tok.TOKENS - 1, False)):
        src = with_text(small, vocab_size=vocab).write(tmp_path / str(vocab))
        with pytest.raises(ConvertError) as caught:  # the embedding has the old size either way
            plan(src)
        wanted = f"token id {tok.TOKENS - 1}, vocab_size is {vocab}"
        assert (wanted in str(caught.value)) == (not good)


def test_end_of_text_ids_outside_the_vocabulary(small: Built, tmp_path: Path) -> None:
    src = small.write(tmp_path / "src")
    vocab = small.text["vocab_size"]
    for token, good in ((vocab - 1, True), (vocab, False)):
        (src / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
        if good:
            plan(src).close()
        else:
            with pytest.raises(ConvertError, match=f"eos_token_id {vocab}, vocab_size is {vocab}"):
                plan(src)


@pytest.mark.parametrize(
    ("splits", "nfc", "use_regex", "name"),
    [
        (["qwen35"], True, False, "qwen35"),
        (["qwen2"], True, False, "qwen2"),
        (["qwen2"], False, False, None),
        ([], False, True, "gpt-2"),
        (["gpt-2"], False, False, "gpt-2"),
        (["qwen35", "qwen35"], True, False, None),
        ([], False, False, None),
    ],
)
def test_pre_tokenizer_names(
    splits: list[str], nfc: bool, use_regex: bool, name: str | None
) -> None:
    from imp_runtime.tokenizer.pretokenizers import PRE_TOKENIZERS

    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for s in splits
        for p in PRE_TOKENIZERS[s].patterns
    ]
    steps.append({"type": "ByteLevel", "use_regex": use_regex})
    parsed = {
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {"type": "BPE"},
    }
    assert pre_tokenizer_name(parsed) == name


def test_constants_of_the_released_model() -> None:
    """The values that the released checkpoint stores."""
    c = derive(
        vocab_size=248320, seed=1234, ngram_size=3, heads_per_ngram=8, base=20_000_000, index=0
    )
    assert c.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert c.vocab_sizes[:3] == (20000003, 20000023, 20000033)
    assert c.vocab_sizes[-1] == 20000171
    assert c.offsets[-1] == 300001275
    assert c.rows == 320001446


def test_constants_are_derived_where_the_checkpoint_has_none(tmp_path: Path) -> None:
    built = build(mtp="")
    for name in [n for n in built.tensors if ".ngram_heads" in n or "layer_multipliers" in n]:
        del built.tensors[name]
    out = tmp_path / "out.gguf"
    convert(built.write(tmp_path / "src"), out)
    got = [int(v) for v in ReadBack(out).key("qwen4exp.ple.layer_multipliers")]
    assert got == ngram_constants(built.text, 0)[0]


def test_w4a16_modules_are_tagged(tmp_path: Path) -> None:
    built = build(experts="nvfp4", mtp="")
    built.root["quantization_config"] = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.language_model.layers.2.mlp.experts": {"quant_algo": "W4A16_NVFP4"},
            "model.language_model.layers.1.mlp.experts": {"quant_algo": "NVFP4"},
        },
    }
    out = tmp_path / "out.gguf"
    convert(built.write(tmp_path / "src"), out)
    names = list(ReadBack(out).key("general.tensor_extra.name"))
    assert names == [f"blk.2.ffn_{p}_exps.weight" for p in ("down", "gate", "up")]
    assert list(ReadBack(out).key("general.tensor_extra.prec_a4")) == [False] * 3


def test_broken_model_card_is_only_a_note(small: Built, tmp_path: Path) -> None:
    src = small.write(tmp_path / "src")
    (src / "README.md").write_text("---\nlicense: [apache\n---\n# card\n")
    with plan(src) as planned:
        assert any(n.startswith("model card ignored") for n in planned.notes)
    (src / "README.md").write_text("---\nlicense: apache-2.0\n---\n# card\n")
    with plan(src) as planned:
        assert planned.writer.kv_data[0]["general.license"].value == "apache-2.0"
