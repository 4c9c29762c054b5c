"""Routing, experts and their sum against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from imp_runtime.errors import ImpError
from tests.ops import harness as h
from tests.ops import refs

WEIGHT_TOLERANCE = 1e-6  # and half a rounding per addend of the sum
FFN_TOLERANCE = 1e-5  # two products and a gate in fp32
COMBINE_TOLERANCE = 2e-6


def check_route(device: h.Device, logits: np.ndarray, k: int, renormalise: bool) -> np.ndarray:
    got = device.run("route", {"logits": logits, "k": k, "renormalise": int(renormalise)})
    ids, weights = refs.route(h.f64(logits), k, renormalise)
    np.testing.assert_array_equal(got["ids"], ids)
    h.close(got["weights"], weights, WEIGHT_TOLERANCE + k * 2.0**-25)
    return got["ids"]


@pytest.mark.parametrize("experts", [1, 2, 17, 256, 257, 512, 1024])
@pytest.mark.parametrize("renormalise", [True, False])
def test_route(device: h.Device, experts: int, renormalise: bool) -> None:
    rng = np.random.RandomState(experts)
    for rows in (1, 3, 65):
        for k in {1, min(10, experts), experts}:
            check_route(device, 3 * h.normal(rng, rows, experts), k, renormalise)


@pytest.mark.parametrize("experts", [257, 512, 1024])
def test_route_to_the_last_experts(device: h.Device, experts: int) -> None:
    logits = h.normal(np.random.RandomState(1), 3, experts)
    logits[:, -1] += 20
    logits[:, 256:] += 10
    ids = check_route(device, logits, min(10, experts - 256), True)
    assert (ids[:, 0] == experts - 1).all() and (ids >= 256).all()


def test_route_ties_go_to_the_lower_id(device: h.Device) -> None:
    rng = np.random.RandomState(2)
    for experts in (4, 16, 512):
        check_route(device, np.zeros((3, experts), np.float32), 4, True)
        few = h.f32(rng.randint(0, 3, (33, experts)))
        check_route(device, few, 4, False)
        check_route(device, few, experts, True)
    signed = h.f32([[0.0, -0.0, 0.0, -0.0]])  # equal as well
    check_route(device, signed, 3, True)


def test_route_of_extreme_logits(device: h.Device) -> None:
    logits = h.f32([[3e38, -3e38, 0, 1e38], [-100, -101, -102, -103], [88, 89, 90, 91]])
    check_route(device, logits, 2, True)
    check_route(device, logits, 2, False)


def test_route_of_nan_names_real_experts(device: h.Device) -> None:
    """Whatever the logits, an id never points outside the bank."""
    rng = np.random.RandomState(3)
    for experts, k in ((7, 3), (512, 10), (512, 512)):
        logits = h.normal(rng, 40, experts)
        logits[rng.uniform(size=logits.shape) < rng.uniform(0, 1, (40, 1))] = np.nan
        logits[0] = np.nan
        ids = device.run("route", {"logits": logits, "k": k, "renormalise": 1})["ids"]
        assert ids.min() >= 0 and ids.max() < experts
        assert all(len(set(row)) == k for row in ids)


# ---------------------------------------------------------------- experts


def check_ffn(
    device: h.Device, kind: str, ids: np.ndarray, experts: int, hidden: int, ff: int
) -> None:
    rng = np.random.RandomState(experts + hidden)
    gate, gate_values = h.bank(rng, kind, experts, ff, hidden)
    up, up_values = h.bank(rng, kind, experts, ff, hidden)
    down, down_values = h.bank(rng, kind, experts, hidden, ff)
    x = h.normal(rng, len(ids), hidden)
    args = {"x": x, "ids": np.ascontiguousarray(ids, np.int32)}
    y = device.run("expert_ffn", args | {"gate": gate, "up": up, "down": down})["y"]
    want = refs.experts(h.f64(x), ids, gate_values, up_values, down_values)
    h.close(y, want.reshape(-1, hidden), FFN_TOLERANCE)


def chosen(rng: np.random.RandomState, rows: int, experts: int, k: int) -> np.ndarray:
    return np.stack([rng.permutation(experts)[:k] for _ in range(rows)])


@pytest.mark.parametrize("kind", h.MATRIX_TYPES)
def test_expert_ffn(device: h.Device, kind: str) -> None:
    """Some experts get no token, and with 97 rows one gets more than a task holds."""
    rng = np.random.RandomState(1)
    for rows in (1, 3, 64, 97):
        ids = chosen(rng, rows, 7, 3)
        ids[ids == 4] = 6  # an empty expert; the last one twice in a row now and then
        check_ffn(device, kind, ids, 8, 64, 128)
    check_ffn(device, kind, np.full((203, 1), 1), 2, 64, 64)


@pytest.mark.parametrize("experts", [1, 256, 257, 512, 1024])
def test_expert_ffn_expert_ids(device: h.Device, experts: int) -> None:
    rng = np.random.RandomState(2)
    k = min(10, experts)
    ids = chosen(rng, 5, experts, k)
    ids[0, 0] = experts - 1
    ids[1:3, 0] = experts // 2
    check_ffn(device, "NVFP4", ids, experts, 64, 64)


def test_expert_ffn_most_experts(device: h.Device) -> None:
    """The CPU has no limit; CUDA counts an expert's tokens in a block's shared memory."""
    limit = 8192
    check_ffn(device, "F32", np.array([[limit - 1, 0]] * 9), limit, 8, 8)
    too_many = np.array([[limit]] * 9)
    if device.backend == "cuda":
        with pytest.raises(ImpError, match=f"{limit + 1} experts in a layer, .* {limit}"):
            check_ffn(device, "F32", too_many, limit + 1, 8, 8)
    else:
        check_ffn(device, "F32", too_many, limit + 1, 8, 8)


def test_expert_ffn_all_experts(device: h.Device) -> None:
    rng = np.random.RandomState(3)
    check_ffn(device, "BF16", chosen(rng, 7, 16, 16), 16, 40, 24)


@pytest.mark.parametrize("hidden", [*range(1, 18), 40, 640])
def test_expert_ffn_widths(device: h.Device, hidden: int) -> None:
    rng = np.random.RandomState(4)
    check_ffn(device, "F32", chosen(rng, 3, 4, 2), 4, hidden, 17)


# ---------------------------------------------------------------- sum


@pytest.mark.parametrize("k", [1, 2, 10, 16])
def test_combine(device: h.Device, k: int) -> None:
    rng = np.random.RandomState(5)
    for rows, cols in [(1, n) for n in range(1, 18)] + [(3, 40), (65, 640), (97, 33)]:
        slots, shared = h.normal(rng, rows * k, cols), h.normal(rng, rows, cols)
        weights = h.f32(rng.uniform(0, 1, (rows, k)))
        logit = rng.standard_normal(rows)
        gate = h.f32(refs.sigmoid(logit)[:, None])
        args = {"slots": slots, "weights": weights, "shared": shared, "shared_gate": gate}
        got = device.run("combine", args)["y"]
        want = refs.combine(
            h.f64(slots).reshape(rows, k, cols), h.f64(weights), h.f64(shared), logit
        )
        h.close(got, want, COMBINE_TOLERANCE)


def test_combine_adds_in_rank_order(device: h.Device) -> None:
    """1e8 - 1e8 + 1 is 1; any other order loses the 1."""
    slots = h.f32([[1e8], [-1e8], [1]])
    weights = np.ones((1, 3), np.float32)
    zero = np.zeros((1, 1), np.float32)
    args = {"slots": slots, "weights": weights, "shared": zero, "shared_gate": zero}
    assert device.run("combine", args)["y"][0, 0] == 1


# ---------------------------------------------------------------- all of it


@pytest.mark.parametrize("kind", ["NVFP4", "BF16", "F32"])
def test_moe_ffn(device: h.Device, kind: str) -> None:
    """Bit for bit its parts, at every size where a device changes its way."""
    rng = np.random.RandomState(6)
    for rows, k, hidden, ff in (
        (1, 10, 128, 64),
        (3, 3, 192, 128),
        (4, 12, 64, 640),
        (9, 4, 64, 64),
    ):
        experts = 16
        gate, gate_values = h.bank(rng, kind, experts, ff, hidden)
        up, up_values = h.bank(rng, kind, experts, ff, hidden)
        down, down_values = h.bank(rng, kind, experts, hidden, ff)
        shared_down, shared_values = h.weight(rng, "BF16", hidden, ff, 0.5)
        ids = np.ascontiguousarray(chosen(rng, rows, experts, k), np.int32)
        weights, logit = h.f32(rng.uniform(0, 1, (rows, k))), rng.standard_normal(rows)
        x = h.normal(rng, rows, hidden)
        share = h.f32(refs.sigmoid(logit)[:, None])
        narrow = {"shared_gate": h.normal(rng, rows, ff), "shared_up": h.normal(rng, rows, ff)}
        banks = {"gate": gate, "up": up, "down": down}
        args = {"x": x, "ids": ids, "weights": weights, "share": share, "shared_down": shared_down}
        got = device.run("moe_ffn", args | banks | narrow)["y"]

        slots = device.run("expert_ffn", {"x": x, "ids": ids} | banks)["y"]
        act = device.run("swiglu", {"gate": narrow["shared_gate"], "up": narrow["shared_up"]})["y"]
        linear = {"x": act, "w": shared_down, "alpha": 1.0, "act": "none"}
        shared = device.run("linear", linear)["y"]
        parts = {"slots": slots, "weights": weights, "shared": shared, "shared_gate": share}
        h.same(got, device.run("combine", parts)["y"])

        z = h.f64(narrow["shared_gate"])
        want = refs.combine(
            refs.experts(h.f64(x), ids, gate_values, up_values, down_values).reshape(
                rows, k, hidden
            ),
            h.f64(weights),
            (z * refs.sigmoid(z) * h.f64(narrow["shared_up"])) @ shared_values.T,
            logit,
        )
        h.close(got, want, FFN_TOLERANCE)


@pytest.mark.parametrize("k, experts", [(10, 512), (4, 40), (11, 257), (28, 1024), (29, 64)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_routed_moe_ffn(device: h.Device, k: int, experts: int, renormalise: bool) -> None:
    """The op that chooses experts by itself: bit for bit the choice and then the experts."""
    rng = np.random.RandomState(k)
    hidden, ff, most = 256, 128, 9
    kind = "NVFP4"
    banks = {"gate": h.bank(rng, kind, experts, ff, hidden)[0]}
    banks["up"] = h.bank(rng, kind, experts, ff, hidden)[0]
    banks["down"] = h.bank(rng, kind, experts, hidden, ff)[0]
    banks["shared_down"] = h.weight(rng, "BF16", hidden, ff, 0.5)[0]
    logits = h.normal(rng, most, experts)
    logits[0, -1] += 20
    logits[1] = rng.randint(0, 3, experts)  # ties, of which the lower ids win
    logits[2] = np.nan
    rows = {
        "x": h.normal(rng, most, hidden),
        "share": h.f32(rng.uniform(0, 1, (most, 1))),
        "shared_gate": h.normal(rng, most, ff),
        "shared_up": h.normal(rng, most, ff),
    }
    for first, n in ((0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (4, 5), (0, most)):
        part = {name: np.ascontiguousarray(v[first : first + n]) for name, v in rows.items()}
        choice = {
            "logits": np.ascontiguousarray(logits[first : first + n]),
            "k": k,
            "renormalise": int(renormalise),
        }
        chosen = device.run("route", choice)
        got = device.run("routed_moe_ffn", choice | part | banks)
        np.testing.assert_array_equal(got["ids"], chosen["ids"])
        h.same(got["weights"], chosen["weights"])
        if first != 2 and not (first == 0 and n > 2):
            assert np.isfinite(got["y"]).all()
        h.same(got["y"], device.run("moe_ffn", part | banks | chosen)["y"])


# ---------------------------------------------------------------- sizes of a step

ROWS = (1, 3, 4, 5, 8, 9, 33, 64, 65)


def sparse_bank(
    rng: np.random.RandomState, experts: int, used: Sequence[int], rows: int, cols: int
) -> tuple[tuple[Any, ...], np.ndarray]:
    """An NVFP4 bank of which only `used` make sense, the rest is bytes of 0x7e: (the op's argument,
    float64 [len(used), rows, cols])"""
    raw, values = h.stored(rng, "NVFP4", (len(used), rows, cols))
    stored = np.full((experts, raw.size // len(used)), 0x7E, np.uint8)
    stored[list(used)] = raw.reshape(len(used), -1)
    scales = np.full(experts, 1e30, np.float32)
    scales[list(used)] = rng.uniform(0.5, 2, len(used))
    argument = (h.IDS["NVFP4"], stored.reshape(-1), experts, rows, cols, scales)
    return argument, values * h.f64(scales[list(used)])[:, None, None]


@pytest.mark.parametrize("skew", ["even", "hot", "one"])
@pytest.mark.parametrize("hidden, ff", [(256, 128), (640, 256), (192, 128)])
def test_moe_ffn_of_any_number_of_rows(device: h.Device, hidden: int, ff: int, skew: str) -> None:
    """Right at every size where a device changes its way, and a row's bits depend on neither the
    others nor its place."""
    rng = np.random.RandomState(7)
    experts, most = 512, max(ROWS)
    used = [0, 1, 7, 128, 255, 256, 257, 400, 510, 511]
    if skew == "one":
        local = np.full((most, 1), len(used) - 1)
    else:
        local = chosen(rng, most, len(used), 4)
    if skew == "hot":  # expert 256 first everywhere
        local = np.stack([[5, *row[row != 5]][:4] for row in local])
    k = local.shape[1]
    ids = np.ascontiguousarray(np.asarray(used)[local], np.int32)
    gate, gate_values = sparse_bank(rng, experts, used, ff, hidden)
    up, up_values = sparse_bank(rng, experts, used, ff, hidden)
    down, down_values = sparse_bank(rng, experts, used, hidden, ff)
    shared_down, shared_values = h.weight(rng, "BF16", hidden, ff, 0.5)
    rows = {
        "x": h.normal(rng, most, hidden),
        "ids": ids,
        "weights": h.f32(rng.uniform(0, 1, (most, k))),
        "share": h.f32(rng.uniform(0, 1, (most, 1))),
        "shared_gate": h.normal(rng, most, ff),
        "shared_up": h.normal(rng, most, ff),
    }
    weights = {"gate": gate, "up": up, "down": down, "shared_down": shared_down}

    def run(chosen_rows: np.ndarray) -> np.ndarray:
        part = {name: np.ascontiguousarray(v[chosen_rows]) for name, v in rows.items()}
        return device.run("moe_ffn", part | weights, batch_invariant=True)["y"]

    all_rows = run(np.arange(most))
    z, share = h.f64(rows["shared_gate"]), h.f64(rows["share"])[:, 0]
    want = refs.combine(
        refs.experts(h.f64(rows["x"]), local, gate_values, up_values, down_values).reshape(
            most, k, hidden
        ),
        h.f64(rows["weights"]),
        (z * refs.sigmoid(z) * h.f64(rows["shared_up"])) @ shared_values.T,
        np.log(share / (1 - share)),
    )
    h.close(all_rows, want, FFN_TOLERANCE)
    for n in ROWS:
        h.same(run(np.arange(n)), all_rows[:n])
        few = {name: np.ascontiguousarray(v[:n]) for name, v in rows.items()}
        h.close(device.run("moe_ffn", few | weights)["y"], want[:n], FFN_TOLERANCE, want)
        backwards = np.arange(most)[::-1][:n]
        h.same(run(backwards), all_rows[backwards])


@pytest.mark.parametrize(
    "hidden, ff, k",
    [
        (2688, 768, 3),  # shares of 5 and 6 tiles, and more tiles than a stage takes
        (4096, 128, 2),  # the widest that CUDA keeps in tiles
        (4096, 128, 10),  # more rows a block than it has stages for
        (4224, 128, 2),
        (128, 4096, 2),
        (128, 4224, 2),
        (128, 128, 10),
        (128, 128, 11),  # more warps a block
        (128, 128, 28),  # the most slots that CUDA sums without storing them
        (128, 128, 29),
    ],
)
def test_moe_ffn_of_any_shape(device: h.Device, hidden: int, ff: int, k: int) -> None:
    rng = np.random.RandomState(hidden + ff + k)
    experts, most = 40, 9
    local = chosen(rng, most, k + 2, k)
    used = np.sort(rng.permutation(experts)[: k + 2])
    gate, gate_values = sparse_bank(rng, experts, list(used), ff, hidden)
    up, up_values = sparse_bank(rng, experts, list(used), ff, hidden)
    down, down_values = sparse_bank(rng, experts, list(used), hidden, ff)
    shared_down, shared_values = h.weight(rng, "BF16", hidden, 64, 0.5)
    x, weights = h.normal(rng, most, hidden), h.f32(rng.uniform(0, 1, (most, k)))
    narrow, wide = h.normal(rng, most, 64), h.normal(rng, most, 64)
    logit = rng.standard_normal(most)
    share = h.f32(refs.sigmoid(logit)[:, None])
    z = h.f64(narrow)
    want = refs.combine(
        refs.experts(h.f64(x), local, gate_values, up_values, down_values).reshape(most, k, hidden),
        h.f64(weights),
        (z * refs.sigmoid(z) * h.f64(wide)) @ shared_values.T,
        logit,
    )
    for n in (1, 2, 4, 5, most):
        rows = {
            "x": x[:n],
            "ids": np.ascontiguousarray(used[local[:n]], np.int32),
            "weights": weights[:n],
            "share": share[:n],
            "shared_gate": narrow[:n],
            "shared_up": wide[:n],
        }
        banks = {"gate": gate, "up": up, "down": down, "shared_down": shared_down}
        h.close(device.run("moe_ffn", rows | banks)["y"], want[:n], FFN_TOLERANCE)
