"""The references themselves: against known decoders, and one form of an op against the other."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest

from tests.ops import refs

rng = np.random.RandomState(7)


def test_f16_bf16_e4m3_decode_every_bit_pattern() -> None:
    halves = np.arange(65536, dtype="<u2")
    raw = halves.view(np.uint8)
    np.testing.assert_array_equal(refs.decode_f16(raw), halves.view(np.float16).astype(float))
    with np.errstate(invalid="ignore"):  # signalling NaN patterns
        brain = halves.view(ml_dtypes.bfloat16).astype(float)
    np.testing.assert_array_equal(refs.decode_bf16(raw), brain)
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(float)
    np.testing.assert_array_equal(refs.decode_e4m3(codes), want)


def test_q8_0_decodes_as_gguf() -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = gguf.quants.quantize(rng.standard_normal((5, 96)).astype(np.float32), kind)
    np.testing.assert_array_equal(refs.decode_q8_0(raw), gguf.quants.dequantize(raw, kind).ravel())


def test_nvfp4_decodes_as_gguf() -> None:
    raw = rng.randint(0, 256, (7, 72)).astype(np.uint8)
    raw[:, :4] = rng.randint(0, 127, (7, 4))
    raw[:, 36:40] = rng.randint(0, 127, (7, 4))
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.NVFP4).ravel()
    np.testing.assert_array_equal(refs.decode_nvfp4(raw), want)


def test_the_two_nvfp4_layouts_hold_the_same_values() -> None:
    codes = rng.randint(0, 16, (3, 64)).astype(np.uint8)
    scales = rng.randint(0, 127, (3, 4)).astype(np.uint8)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    groups = codes.reshape(3, 4, 16)
    blocks = np.concatenate(
        [scales, (groups[..., :8] | groups[..., 8:] << 4).reshape(3, 32).astype(np.uint8)], axis=1
    )
    np.testing.assert_array_equal(
        refs.decode_modelopt_nvfp4(packed, scales, 1.0).ravel(), refs.decode_nvfp4(blocks)
    )


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
def test_recurrent_and_chunked_delta_rule_agree(tokens: int) -> None:
    heads, dk, dv = 2, 8, 12
    q = refs.l2_norm(rng.standard_normal((tokens, heads, dk))) / np.sqrt(dk)
    k = refs.l2_norm(rng.standard_normal((tokens, heads, dk)))
    v = rng.standard_normal((tokens, heads, dv))
    g = -rng.uniform(0, 2, (tokens, heads))
    beta = rng.uniform(0, 1, (tokens, heads))
    state = rng.standard_normal((heads, dk, dv))
    a, sa = refs.delta_recurrent(q, k, v, g, beta, state)
    b, sb = refs.delta_chunked(q, k, v, g, beta, state)
    np.testing.assert_allclose(a, b, atol=1e-12)
    np.testing.assert_allclose(sa, sb, atol=1e-12)


def test_convolution_in_pieces_is_the_whole() -> None:
    x, taps = rng.standard_normal((20, 3)), rng.standard_normal((3, 4))
    history = np.zeros((9, 3))
    whole, end = refs.dilated_conv(x, history, taps, 3)
    parts = []
    for a, e in ((0, 1), (1, 3), (3, 14), (14, 20)):
        y, history = refs.dilated_conv(x[a:e], history, taps, 3)
        parts.append(y)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(history, end)
    want = sum(taps[:, j] * x[19 - 3 * (3 - j)] for j in range(4))
    np.testing.assert_allclose(whole[19], want)


def test_published_ngram_rows() -> None:
    """Row ids of the released model for [1, 2, EOS, 5, 6] at the start of a sequence."""
    multipliers = [23703573157769, 20109073645365, 8052911324071]
    # fmt: off
    tails = [3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171]
    # fmt: on
    sizes = [20_000_000 + t for t in tails]
    offsets = [sum(sizes[:i]) for i in range(16)]
    eos = 248044
    rows = refs.ngram_rows([1, 2, eos, 5, 6], [eos, eos], multipliers, sizes, offsets, eos)
    assert [(int(r[0]), int(r[8])) for r in rows] == [
        (16121432, 176283436),
        (15220011, 170367010),
        (2993698, 165238550),
        (15389869, 179763390),
        (15567690, 164414634),
    ]


def test_ties_go_to_the_lower_id() -> None:
    ids, w = refs.route(np.array([[1.0, 3.0, 3.0, 1.0, 1.0]]), 3, renormalise=True)
    assert ids.tolist() == [[1, 2, 0]] and abs(w.sum() - 1) < 1e-15
    assert refs.select_blocks(np.array([0.0, 2.0, 0.0, 0.0]), 2).tolist() == [0, 1]
    assert refs.argmax(np.array([[0.0, 5.0, 5.0]])).tolist() == [1]


def test_selected_keys_are_blocks_and_tail() -> None:
    scores = np.array([1.0, 3.0, 2.0])
    assert refs.selected_keys(13, scores, 2, 4).tolist() == [*range(4, 12), 12, 13]
    assert refs.selected_keys(11, scores, 1, 4).tolist() == [4, 5, 6, 7]  # not even itself
