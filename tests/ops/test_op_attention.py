"""Rotation, cache, block indexer and attention against float64."""

from __future__ import annotations

import numpy as np
import pytest

from imp_runtime.errors import ImpError
from tests.ops import harness as h
from tests.ops import refs

NORM_TOLERANCE = 2e-6
ATTEND_TOLERANCE = 5e-6  # softmax and weighted sum in fp32
THETA = 1e7
EPS = float(np.float32(1e-6))
AT, MORE = 16, 32

# ---------------------------------------------------------------- rotation


def rope_table(positions: list[int], dim: int, theta: float) -> np.ndarray:
    """float64 [T, dim]: cosines, then sines; angles are float32 by contract"""
    half = dim // 2
    one = np.zeros((len(positions), 1, dim))
    one[:, :, :half] = 1
    return refs.rope(one, positions, dim, theta)[:, 0]  # x = 1, y = 0 turns to (cos, sin)


@pytest.mark.parametrize("dim", [2, 8, 34, 64])
@pytest.mark.parametrize("theta", [1e7, 10000.0])
def test_rope_table(device: h.Device, dim: int, theta: float) -> None:
    """A last-place difference of the frequency grows with the position."""
    positions = [0, 1, 2, 63, 64, 4095, 32767, 262143]
    got = device.run("rope_table", {"dim": dim, "theta": theta}, {"positions": positions})["y"]
    want = rope_table(positions, dim, theta)
    half = dim // 2
    frequency = theta ** (-2 * np.arange(half) / dim)
    angle = np.array(positions)[:, None] * frequency
    allowed = np.tile(2e-7 + 1.3e-7 * angle * (frequency < 1), (1, 2))
    assert (np.abs(got - want) <= allowed).all()
    np.testing.assert_array_equal(got[0], [1.0] * half + [0.0] * half)


def table_for(positions: list[int], dim: int) -> np.ndarray:
    return h.f32(rope_table(positions, dim, THETA))


@pytest.mark.parametrize("stride", [1, 2])
def test_head_norm_rope(device: h.Device, stride: int) -> None:
    """Heads of a query interleaved with gates are read with a stride of two heads."""
    rng = np.random.RandomState(1)
    cases = [(1, n, n - n % 2) for n in range(2, 18)] + [(3, 40, 10), (2, 256, 64), (4, 17, 2)]
    for heads, dim, rotary in cases:
        for rows in (1, 5, 65):
            positions = rng.randint(0, 4000, rows).tolist()
            x, w = h.normal(rng, rows, heads * stride * dim), h.normal(rng, dim)
            args = {"x": x, "rope": table_for(positions, rotary), "w": w, "heads": heads}
            args |= {"dim": dim, "stride": stride * dim, "rotary_dim": rotary, "eps": EPS}
            got = device.run("head_norm_rope", args)["y"]
            parts = h.f64(x).reshape(rows, heads, stride * dim)[:, :, :dim]
            want = refs.head_norm_rope(parts, h.f64(w), EPS, positions, rotary, THETA)
            h.close(got, want.reshape(rows, -1), NORM_TOLERANCE)


# ---------------------------------------------------------------- cache

CHUNKS = [
    [(0, 1)],
    [(15, 2), (0, 16)],
    [(17, 3), (0, 65), (64, 1), (31, 33)],
]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("page_tokens", [4, 16, 20])
def test_kv_store(device: h.Device, chunks: list[tuple[int, int]], page_tokens: int) -> None:
    rng = np.random.RandomState(2)
    s = h.steps(rng, chunks, page_tokens)
    for width in (1, 17, 512):
        k, v = h.normal(rng, s.total, width), h.normal(rng, s.total, width)
        keys, values = s.cache(page_tokens, width), s.cache(page_tokens, width)
        want_k, want_v = keys.copy(), values.copy()
        device.run("kv_store", {"k": k, "v": v}, s.inputs(kv=[(keys, values, None)]))
        for i, n in enumerate(s.rows):
            p = s.positions[i]
            at = tuple(np.array(x)[p : p + n] for x in s.slots(i, p + n, page_tokens))
            want_k[at], want_v[at] = k[s.part(i)], v[s.part(i)]
        h.same(keys, want_k)
        h.same(values, want_v)


def needs(device: h.Device, *kinds: str) -> list[str]:
    """The `cache_types` of a step. Skips what the device lacks."""
    if device.backend == "cuda" and "Q8_0" in kinds:
        pytest.skip("CUDA caches no q8_0")
    return [kind.lower() for kind in kinds]


def hard_values(rng: np.random.RandomState, rows: int, width: int) -> np.ndarray:
    """float32 [rows, width]: all magnitudes, and what rounds in the middle."""
    x = h.normal(rng, rows, width) * h.f32(10.0 ** rng.randint(-9, 4, (rows, 1)))
    x[::5, ::3] = 0
    x[1::5] = rng.randint(-254, 255, (len(x[1::5]), width)) / 2  # Q8_0 codes in the middle
    x[1::5, ::32] = 127
    x[2::5] = 1 + rng.randint(0, 64, (len(x[2::5]), width)) / 2**12  # f16 in the middle
    x[3::5] = 1 + rng.randint(0, 64, (len(x[3::5]), width)) / 2**9  # bf16 in the middle
    x[4::5] = 0
    return h.f32(x)


@pytest.mark.parametrize("k_kind", h.CACHE_TYPES)
@pytest.mark.parametrize("v_kind", h.CACHE_TYPES)
def test_kv_store_encodes_as_gguf(device: h.Device, k_kind: str, v_kind: str) -> None:
    """Byte for byte, and nothing beside."""
    rng = np.random.RandomState(2)
    types = needs(device, k_kind, v_kind)
    for chunks in CHUNKS:
        s = h.steps(rng, chunks)
        for width in (32, 512):
            k, v = hard_values(rng, s.total, width), hard_values(rng, s.total, width)
            keys, values = s.stored(k_kind, width), s.stored(v_kind, width)
            want_k, want_v = keys.copy(), values.copy()
            step = s.inputs(kv=[(keys, values, None)], cache_types=types)
            device.run("kv_store", {"k": k, "v": v}, step)
            stored_k, stored_v = h.cached(k_kind, k)[0], h.cached(v_kind, v)[0]
            for i, n in enumerate(s.rows):
                p = s.positions[i]
                at = tuple(np.array(x)[p : p + n] for x in s.slots(i, p + n, s.page_tokens))
                want_k[at], want_v[at] = stored_k[s.part(i)], stored_v[s.part(i)]
            h.same(keys, want_k)
            h.same(values, want_v)


@pytest.mark.parametrize("kind", h.CACHE_TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_kv_store_hides_no_fault(device: h.Device, kind: str, bad: float) -> None:
    """What is not a number is none when it is read; its neighbours in a block may be lost."""
    types = needs(device, kind, kind)
    s = h.steps(np.random.RandomState(2), [(0, 2)])
    x = np.ones((2, 64), np.float32)
    x[1, 40] = bad
    keys, values = s.stored(kind, 64), s.stored(kind, 64)
    step = s.inputs(kv=[(keys, values, None)], cache_types=types)
    device.run("kv_store", {"k": x, "v": x}, step)
    for cache in (keys, values):
        read = h.DECODE[kind](cache[s.pages[0][0], :2].reshape(-1)).reshape(2, 64)
        assert not np.isfinite(read[1, 40])
        assert np.isfinite(read[0]).all() and np.isfinite(read[1, :32]).all()


def test_cache_types_that_are_not_there(device: h.Device) -> None:
    s = h.steps(np.random.RandomState(2), [(0, 2)])
    step = s.inputs(kv=[(s.stored("F32", 32), s.stored("F32", 32), None)])
    x = np.ones((2, 32), np.float32)
    with pytest.raises(ImpError, match="cache type q4_0 is not supported, only f32, f16, bf16 and"):
        device.run("kv_store", {"k": x, "v": x}, step | {"cache_types": ["f32", "q4_0"]})
    if device.backend == "cuda":
        with pytest.raises(
            ImpError, match="cuda: cache type q8_0 is not supported, only f32, f16, bf16"
        ):
            device.run("kv_store", {"k": x, "v": x}, step | {"cache_types": ["f32", "q8_0"]})


# ---------------------------------------------------------------- indexer


def index_case(rng: np.random.RandomState, s: h.Steps, dim: int, ratio: int) -> tuple:
    """Raw keys of every sequence from its start; the state and cache as earlier steps left them.
    Returns (raw [rows, dim], w, history by sequence, state, index cache)"""
    w = h.normal(rng, dim)
    history = [h.normal(rng, p + n, dim) for p, n in zip(s.positions, s.rows, strict=True)]
    state = s.state(AT + ratio * dim + MORE)
    index = s.cache(s.page_tokens // ratio, dim)
    for i, p in enumerate(s.positions):
        for token in range(p - p % ratio, p):
            slot = AT + token % ratio * dim
            state[s.state_rows[i], slot : slot + dim] = history[i][token]
        keys = refs.block_keys(h.f64(history[i][:p]), h.f64(w), EPS, ratio, dim // 2 * 2, THETA)
        if len(keys):
            index[s.slots(i, len(keys), s.page_tokens // ratio)] = keys
    raw = h.f32(np.concatenate([x[p:] for x, p in zip(history, s.positions, strict=True)]))
    return raw, w, history, state, index


@pytest.mark.parametrize("chunks", [*CHUNKS, [(3, 1), (2, 5), (7, 60)]], ids=str)
@pytest.mark.parametrize("dim, ratio", [(2, 4), (16, 4), (17, 4), (128, 4), (16, 1), (16, 16)])
def test_index_keys(device: h.Device, chunks: list[tuple[int, int]], dim: int, ratio: int) -> None:
    rng = np.random.RandomState(3)
    s = h.steps(rng, chunks)
    rotary = dim // 2 * 2
    raw, w, history, state, index = index_case(rng, s, dim, ratio)
    before, state_before = index.copy(), state.copy()
    args = {"raw": raw, "w": w, "ratio": ratio, "rotary_dim": rotary, "theta": THETA, "eps": EPS}
    kv = (np.zeros(1, np.float32), np.zeros(1, np.float32), index)
    device.run("index_keys", args | {"state": AT}, s.inputs(state=state, kv=[kv]))
    for i, (p, n) in enumerate(zip(s.positions, s.rows, strict=True)):
        keys = refs.block_keys(h.f64(history[i]), h.f64(w), EPS, ratio, rotary, THETA)
        at = s.slots(i, len(keys), s.page_tokens // ratio)
        if len(keys):
            h.close(index[at], keys, 5e-6)
        fresh = tuple(np.array(x, int)[p // ratio :] for x in at)
        before[fresh] = index[fresh]
        row = s.state_rows[i]
        for token in range((p + n) // ratio * ratio, p + n):  # the incomplete block
            slot = AT + token % ratio * dim
            h.same(state[row, slot : slot + dim], history[i][token])
        state[row, AT : AT + ratio * dim] = state_before[row, AT : AT + ratio * dim]
    h.same(index, before)  # earlier blocks and other pages are as they were
    h.same(state, state_before)


@pytest.mark.parametrize("chunks", [*CHUNKS, [(3, 1), (2, 5), (7, 60)], [(0, 7)]], ids=str)
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_attend_inputs(device: h.Device, chunks: list[tuple[int, int]], ratio: int) -> None:
    """The same as its parts, which are compared with float64 above."""
    rng = np.random.RandomState(8)
    heads, kv_heads, dim, rotary, index_heads, index_dim = 6, 2, 34, 16, 3, 20
    s = h.steps(rng, chunks)
    raw, w, _, state, index = index_case(rng, s, index_dim, ratio)
    positions = [p + i for p, n in zip(s.positions, s.rows, strict=True) for i in range(n)]
    rope = table_for(positions, rotary)
    qg = h.normal(rng, s.total, heads * 2 * dim)
    k, v = h.normal(rng, s.total, kv_heads * dim), h.normal(rng, s.total, kv_heads * dim)
    iq = h.normal(rng, s.total, index_heads * index_dim)
    norms = {"q_norm": h.normal(rng, dim), "k_norm": h.normal(rng, dim)}
    norms |= {"index_q_norm": h.normal(rng, index_dim), "index_k_norm": w}
    keys, values = s.cache(s.page_tokens, kv_heads * dim), s.cache(s.page_tokens, kv_heads * dim)
    numbers = {"rotary_dim": rotary, "eps": EPS}
    index_numbers = numbers | {"ratio": ratio, "theta": THETA, "state": AT}

    want_keys, want_values, want_index, want_state = (
        x.copy() for x in (keys, values, index, state)
    )
    step = s.inputs(state=want_state, kv=[(want_keys, want_values, want_index)])

    def normed(x: np.ndarray, w: str, heads: int, dim: int, stride: int) -> np.ndarray:
        args = {"x": x, "rope": rope, "w": norms[w], "heads": heads, "dim": dim, "stride": stride}
        return device.run("head_norm_rope", args | numbers)["y"]

    want_q = normed(qg, "q_norm", heads, dim, 2 * dim)
    want_iq = normed(iq, "index_q_norm", index_heads, index_dim, index_dim)
    device.run("kv_store", {"k": normed(k, "k_norm", kv_heads, dim, dim), "v": v}, step)
    device.run("index_keys", {"raw": raw, "w": w} | index_numbers, step)

    args = {"qg": qg, "k": k, "v": v, "index_q": iq, "index_raw": raw, "rope": rope}
    args |= {"heads": heads, "kv_heads": kv_heads}
    step = s.inputs(state=state, kv=[(keys, values, index)])
    got = device.run("attend_inputs", args | norms | index_numbers, step)
    h.same(got["q"], want_q)
    h.same(got["normed_index_q"], want_iq)
    h.same(keys, want_keys)
    h.same(values, want_values)
    h.same(state, want_state)
    if device.backend == "cpu":
        h.same(index, want_index)
    else:  # sums over a warp instead of a block
        assert np.array_equal(np.isnan(index), np.isnan(want_index))
        h.close(np.nan_to_num(index), np.nan_to_num(want_index), 5e-6)


def check_select(
    device: h.Device, s: h.Steps, q: np.ndarray, keys: list[np.ndarray], ratio: int, blocks: int
) -> None:
    """q [rows, heads, dim]; keys[i] [complete blocks of sequence i, dim]"""
    rows, heads, dim = q.shape
    index = s.cache(s.page_tokens // ratio, dim)
    for i, k in enumerate(keys):
        if len(k):
            index[s.slots(i, len(k), s.page_tokens // ratio)] = k
    kv = (np.zeros(1, np.float32), np.zeros(1, np.float32), index)
    args = {"q": q.reshape(rows, -1), "heads": heads, "ratio": ratio, "blocks": blocks}
    got = device.run("index_select", args, s.inputs(kv=[kv]))["selected"]
    for i in range(len(s.rows)):
        for row in range(s.part(i).start, s.part(i).stop):
            position = s.positions[i] + row - s.first(i)
            complete = (position + 1) // ratio
            if complete <= blocks:
                assert got[row, 0] == -1
                continue
            scores = refs.block_scores(h.f64(q[row]), h.f64(keys[i][:complete]))
            np.testing.assert_array_equal(got[row], refs.select_blocks(scores, blocks))


@pytest.mark.parametrize("ratio, blocks", [(4, 1), (4, 8), (4, 512), (1, 5), (16, 3)])
def test_index_select(device: h.Device, ratio: int, blocks: int) -> None:
    """Small whole numbers make exact sums, and ties everywhere."""
    rng = np.random.RandomState(4)
    edge = ratio * (blocks + 1) - 1  # the first token that sees more blocks than it takes
    chunks = [(0, 3), (edge - 2, 5), (edge + ratio * 7, 2), (2 * edge, 33)]
    for heads, dim in ((1, 2), (4, 16), (3, 17), (8, 128)):
        s = h.steps(rng, chunks, 16)
        q = h.f32(rng.randint(-2, 3, (s.total, heads, dim)))
        keys = [
            h.f32(rng.randint(-1, 2, ((p + n) // ratio, dim)))
            for p, n in zip(s.positions, s.rows, strict=True)
        ]
        check_select(device, s, q, keys, ratio, blocks)


def test_index_select_all_equal(device: h.Device) -> None:
    """No block scores above 0: the lowest ones are taken."""
    rng = np.random.RandomState(5)
    s = h.steps(rng, [(99, 2)])
    q = -np.ones((2, 4, 16), np.float32)
    check_select(device, s, q, [np.ones((25, 16), np.float32)], 4, 7)


# ---------------------------------------------------------------- attention


def check_attend(
    device: h.Device,
    s: h.Steps,
    heads: int,
    kv_heads: int,
    dim: int,
    blocks: int = 0,
    ratio: int = 4,
    sharp: float = 1.0,
    kinds: tuple[str, str] = ("F32", "F32"),
    piece: int = 0,
) -> None:
    """Against float64; `piece`: also the same bits in steps of one sequence and so many rows."""
    rng = np.random.RandomState(heads * 100 + dim)
    width = kv_heads * dim
    types = needs(device, *kinds)
    keys, values = (s.stored(kind, width) for kind in kinds)
    q, qg = sharp * h.normal(rng, s.total, heads * dim), h.normal(rng, s.total, 2 * heads * dim)
    selected = np.full((s.total, max(blocks, 1)), 2**31 - 1, np.int32)
    want = np.empty((s.total, heads * dim))
    for i, (p, n) in enumerate(zip(s.positions, s.rows, strict=True)):
        at = s.slots(i, p + n, s.page_tokens)
        keys[at], k = h.cached(kinds[0], h.normal(rng, p + n, width))
        values[at], v = h.cached(kinds[1], h.normal(rng, p + n, width))
        visible = []
        for row in range(s.part(i).start, s.part(i).stop):
            position = p + row - s.first(i)
            complete = (position + 1) // ratio
            if blocks == 0 or complete <= blocks:
                visible.append(np.arange(position + 1))
                selected[row, 0] = -1
            else:
                scores = rng.permutation(complete).astype(float)
                selected[row] = refs.select_blocks(scores, blocks)
                visible.append(refs.selected_keys(position, scores, blocks, ratio))
        part = s.part(i)
        y = refs.attention(
            h.f64(q[part]).reshape(n, heads, dim),
            k.reshape(p + n, kv_heads, dim),
            v.reshape(p + n, kv_heads, dim),
            visible,
        )
        gate = h.f64(qg[part]).reshape(n, heads, 2, dim)[:, :, 1]
        want[part] = (y * refs.sigmoid(gate)).reshape(n, -1)
    args = {"q": q, "qg": qg, "heads": heads, "kv_heads": kv_heads, "ratio": ratio}
    args |= {"blocks": blocks} | ({"selected": selected} if blocks else {})
    untouched = keys.copy(), values.copy()
    step = s.inputs(kv=[(keys, values, None)], cache_types=types)
    got = device.run("attend", args, step)["y"]
    h.close(got, want, ATTEND_TOLERANCE)
    if piece:
        for part, rows in s.split(piece):
            step = part.inputs(kv=[(keys, values, None)], cache_types=types)
            some = {name: args[name][rows] for name in ("q", "qg", "selected") if name in args}
            h.same(device.run("attend", args | some, step)["y"], got[rows])
    h.same(keys, untouched[0])
    h.same(values, untouched[1])


@pytest.mark.parametrize("chunks", [*CHUNKS, [(200, 1)], [(0, 3), (128, 1), (5, 1)]], ids=str)
def test_attend_dense(device: h.Device, chunks: list[tuple[int, int]]) -> None:
    s = h.steps(np.random.RandomState(6), chunks)
    check_attend(device, s, heads=4, kv_heads=2, dim=32)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 12])
def test_attend_head_groups(device: h.Device, group: int) -> None:
    s = h.steps(np.random.RandomState(7), [(0, 5), (40, 2)])
    check_attend(device, s, heads=2 * group, kv_heads=2, dim=64)


@pytest.mark.parametrize("dim", [*range(1, 18), 40, 256])
def test_attend_head_sizes(device: h.Device, dim: int) -> None:
    s = h.steps(np.random.RandomState(8), [(0, 3), (33, 2)])
    check_attend(device, s, heads=6, kv_heads=1, dim=dim)


@pytest.mark.parametrize("blocks, ratio", [(1, 4), (8, 4), (3, 16), (5, 1)])
def test_attend_sparse(device: h.Device, blocks: int, ratio: int) -> None:
    """Each query's own blocks and the incomplete one; below the budget everything."""
    edge = ratio * (blocks + 1) - 1
    s = h.steps(np.random.RandomState(9), [(0, 2), (edge - 3, 9), (3 * edge, 3)])
    check_attend(device, s, 4, 2, 32, blocks, ratio)


@pytest.mark.parametrize("k_kind", h.CACHE_TYPES)
@pytest.mark.parametrize("v_kind", h.CACHE_TYPES)
def test_attend_stored_types(device: h.Device, k_kind: str, v_kind: str) -> None:
    """What was rounded is read exactly: the tolerance is that of fp32."""
    kinds = (k_kind, v_kind)
    s = h.steps(np.random.RandomState(9), [(0, 2), (44, 9), (137, 3)])
    for heads, kv_heads, dim in ((4, 2, 32), (7, 1, 96), (24, 2, 256)):
        check_attend(device, s, heads, kv_heads, dim, kinds=kinds)
        check_attend(device, s, heads, kv_heads, dim, 8, 4, kinds=kinds)
    if "Q8_0" not in kinds:
        for dim in (1, 17, 40):
            check_attend(device, s, 6, 2, dim, kinds=kinds)


@pytest.mark.parametrize("blocks, kind", [(0, "F32"), (520, "BF16")])
def test_attend_released_shape(device: h.Device, blocks: int, kind: str) -> None:
    """Few and many keys, also more than 64 tiles of 64. CUDA cuts the keys of a token into more
    pieces in steps of up to 16 rows: the bits do not show it."""
    s = h.steps(np.random.RandomState(11), [(0, 3), (4200, 2), (639, 11), (2100, 1), (255, 2)])
    check_attend(device, s, 24, 2, 256, blocks, kinds=(kind, kind), piece=1)


@pytest.mark.parametrize("rows", [16, 17])
@pytest.mark.parametrize("group", [3, 12, 13])
def test_attend_released_head_size(device: h.Device, group: int, rows: int) -> None:
    """CUDA takes up to 12 heads of a group on tensor cores."""
    s = h.steps(np.random.RandomState(12), [(100, rows - 1), (65, 1)])
    check_attend(device, s, 2 * group, 2, 256, piece=1)


def test_attend_many_rows(device: h.Device) -> None:
    """More than CUDA's scratch memory holds at once."""
    s = h.steps(np.random.RandomState(13), [(0, 1030)])
    check_attend(device, s, 1, 1, 256, piece=515)


def test_attend_sharp_softmax(device: h.Device) -> None:
    """Scores far apart: one key takes all, and nothing overflows."""
    s = h.steps(np.random.RandomState(10), [(0, 9), (70, 2)])
    check_attend(device, s, 4, 2, 32, sharp=100.0)
