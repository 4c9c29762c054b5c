"""The tiny checkpoints are what the golden files were made from, and exercise what they claim."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.models import checkpoint, tiny, tiny_tokenizer
from tests.models.golden import FOLDER, SEQUENCES, Golden
from tests.models.reference import Reference

Folder = Callable[[str], Path]
MOST_GOLDEN_BYTES = 150_000


@pytest.mark.parametrize("name", tiny.RECIPES)
def test_bytes_are_those_the_golden_was_made_from(name: str, checkpoint_folder: Folder) -> None:
    assert tiny.digest(checkpoint_folder(name)) == Golden(name).meta["checkpoint_sha256"]


@pytest.mark.parametrize("name", tiny.RECIPES)
def test_op_references_reproduce_the_golden(name: str, checkpoint_folder: Folder) -> None:
    """Two implementations that share no code agree: tests/ops/refs.py and the golden's source."""
    golden = Golden(name)
    model = Reference(*checkpoint.load(checkpoint_folder(name)))
    tolerance = 1e-6 * golden.meta["max_abs_logit"]
    for s in SEQUENCES:
        logits, taps = model.forward(golden.tokens(s))
        worst = np.abs(logits[golden[s + ".positions"]] - golden[s + ".logits"]).max()
        assert worst < tolerance, s
        assert (logits.argmax(1) == golden[s + ".argmax"]).all()
        if s != "long":
            continue
        stored = golden.taps()
        assert set(stored) == set(taps)
        for tap, want in stored.items():
            got = taps[tap][golden["long.tap_positions"]]
            assert np.abs(got - want).max() < 1e-5, tap
        if "mtp.logits" in golden.arrays:
            last = f"blk.{len(model.c['layer_types']) - 1}.residual"
            mtp = model.mtp(golden.tokens(s)[1:], taps[last][:-1])
            worst = np.abs(mtp[golden["mtp.positions"]] - golden["mtp.logits"]).max()
            assert worst < 1e-5


# Each entry: tensors (by the end of their name) set to zero, or scaled, one block at a time.
BLOCKS = [
    "layers.0.linear_attn.out_proj.weight",
    "layers.6.linear_attn.out_proj.weight",
    "layers.0.linear_attn.in_proj_z.weight",
    "layers.0.linear_attn.in_proj_b.weight",
    "layers.0.linear_attn.in_proj_a.weight",
    "layers.0.linear_attn.A_log",
    "layers.0.linear_attn.dt_bias",
    "layers.3.self_attn.o_proj.weight",
    "layers.7.self_attn.o_proj.weight",
    "layers.3.self_attn.q_proj.weight",
    "layers.3.self_attn.q_norm.weight",
    "layers.3.self_attn.indexer.index_qk_proj.weight",
    "layers.1.ple.value_proj.weight",
    "layers.1.ple.key_proj.weight",
    "layers.1.ple.conv1d.weight",
    "layers.2.mlp.experts.down_proj",
    "layers.2.mlp.gate.weight",
    "layers.2.mlp.shared_expert.down_proj.weight",
    "layers.2.mlp.shared_expert_gate.weight",
    "layers.4.attn_hyper_connection.block_inject_weight.weight",
    "layers.4.mlp_hyper_connection.input_mix_weight_up.weight",
    "layers.4.mlp_hyper_connection.hc_norm.weight",
    "hyper_connection_mixer.input_mix_weight_down.weight",
]


@pytest.fixture(scope="module")
def base(checkpoint_folder: Folder) -> tuple[Reference, list[int], np.ndarray]:
    model = Reference(*checkpoint.load(checkpoint_folder("base")))
    tokens = Golden("base").tokens("long")[:48]
    return model, tokens, model.forward(tokens)[0]


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_moves_the_logits(
    name: str, base: tuple[Reference, list[int], np.ndarray]
) -> None:
    model, tokens, want = base
    changed = Reference(model.c, model.w | {name: np.zeros_like(model.w[name])})
    got = changed.forward(tokens)[0]
    assert np.abs(got - want).max() > 1e-2 * np.abs(want).max()


def test_swapped_layers_and_experts_move_the_logits(
    base: tuple[Reference, list[int], np.ndarray],
) -> None:
    model, tokens, want = base
    a, b = "layers.4.linear_attn.in_proj_qkv.weight", "layers.5.linear_attn.in_proj_qkv.weight"
    swapped = model.w | {a: model.w[b], b: model.w[a]}
    assert np.abs(Reference(model.c, swapped).forward(tokens)[0] - want).max() > 0.1
    down = model.w["layers.0.mlp.experts.down_proj"]
    turned = model.w | {"layers.0.mlp.experts.down_proj": np.roll(down, 1, axis=0)}
    assert np.abs(Reference(model.c, turned).forward(tokens)[0] - want).max() > 0.1


@pytest.mark.parametrize("name", ["base", "experts512", "options"])
def test_decisions_have_margins(name: str) -> None:
    meta = Golden(name).meta
    assert meta["router_gap"] > 1e-3 and meta["block_gap"] > 5e-4


@pytest.mark.parametrize("name", tiny.RECIPES)
def test_transformers_agrees(name: str) -> None:
    meta = Golden(name).meta
    assert meta["agreement"]["max_abs_difference_float32"] < 2e-5 * meta["max_abs_logit"]


def test_high_experts_win_often() -> None:
    golden = Golden("experts512")
    ids = np.concatenate([golden["long.experts.0"], golden["long.experts.3"]])
    assert 0.4 < (ids >= 256).mean() < 0.6
    for e in (255, 256, 511):
        assert (ids == e).any(axis=1).mean() > 0.05, e
    assert len(np.unique(ids)) > 400


def test_nvfp4_edge_cases_are_there(checkpoint_folder: Folder) -> None:
    raw = checkpoint.raw_tensors(checkpoint_folder("experts512"))
    p = "model.language_model.layers.2.mlp.experts.511."
    scales = raw[p + "up_proj.weight_scale"][2]
    assert {0x00, 0x01, 0x07, 0x08, 0x7E} <= set(scales.tolist())
    codes = raw[p + "up_proj.weight"][2].reshape(64, 32)
    assert (codes[0, :8] == 0x88).all() and (codes[2, :8] == 0).all()
    two = [raw[p + f"{x}_proj.weight_scale_2"][2].tobytes() for x in ("gate", "up", "down")]
    assert len(set(two)) == 3
    table = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding."
    assert raw[table + "weight_scale"][0] == "BF16" and raw[table + "shard_3.weight"][1][1] == 4


def test_context_is_cut_inside_the_golden_sequence() -> None:
    tokens = Golden("base").tokens("long")
    assert tokens.count(tiny_tokenizer.END_OF_TEXT) >= 4
    assert len(tokens) == 190 and len(tokens) % 64 and len(tokens) % 4


def test_golden_files_are_small() -> None:
    for path in FOLDER.glob("*.npz"):
        assert path.stat().st_size < MOST_GOLDEN_BYTES, path.name


def test_tokenizer(checkpoint_folder: Folder) -> None:
    tok = Tokenizer.from_file(str(checkpoint_folder("base") / "tokenizer.json"))
    assert tok.get_vocab_size() == tiny_tokenizer.TOKENS
    text = "<|im_start|>user\nthe other 12 naïve cafés 世界 🚀<|im_end|>"
    ids = tok.encode(text).ids
    assert ids[0] == tiny_tokenizer.IM_START and ids[-1] == tiny_tokenizer.IM_END
    assert tok.decode(ids, skip_special_tokens=False) == text
    assert [tok.id_to_token(i) for i in tok.encode(" there and with").ids] == [
        "Ġthere",
        "Ġand",
        "Ġwith",
    ]
