"""Reference of every op in numpy float64, written from the equations and kept slow and plain.

Shapes: T tokens, H hidden, S residual streams (stream-major: element s*H + c), all arrays float64
unless said otherwise. Linear weights are [out, in]. Weights of `norm` functions are the final
multipliers (a checkpoint's 1 + w is added by the caller)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

# ---------------------------------------------------------------- storage types

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode_f32(raw: U8) -> F64:
    """bytes [n*4] -> [n]"""
    return np.frombuffer(raw.tobytes(), "<f4").astype(np.float64)


def decode_f16(raw: U8) -> F64:
    """bytes [n*2] -> [n]; built from the fields of IEEE binary16."""
    b = np.frombuffer(raw.tobytes(), "<u2").astype(np.int64)
    sign, e, m = b >> 15, (b >> 10) & 31, b & 1023
    v = np.where(e == 0, m * 2.0**-24, (1024 + m) * 2.0 ** (e - 25.0))
    v = np.where(e == 31, np.where(m == 0, np.inf, np.nan), v)
    return np.where(sign == 1, -v, v)


def decode_bf16(raw: U8) -> F64:
    """bytes [n*2] -> [n]; the upper half of a float32."""
    b = np.frombuffer(raw.tobytes(), "<u2").astype(np.uint32) << 16
    with np.errstate(invalid="ignore"):  # signalling NaN patterns
        return b.view(np.float32).astype(np.float64)


def decode_e4m3(raw: U8) -> F64:
    """bytes [...] -> [...]; 1-4-3, bias 7, no infinities, 0x7F and 0xFF are NaN."""
    b = np.asarray(raw, np.uint8).astype(np.int64)
    sign, e, m = b >> 7, (b >> 3) & 15, b & 7
    v = np.where(e == 0, m * 2.0**-9, (8 + m) * 2.0 ** (e - 10.0))
    v = np.where((e == 15) & (m == 7), np.nan, v)
    return np.where(sign == 1, -v, v)


def decode_q8_0(raw: U8) -> F64:
    """bytes [n/32*34] -> [n]; a half scale and 32 signed bytes."""
    r = np.asarray(raw, np.uint8).reshape(-1, 34)
    d = decode_f16(r[:, :2])
    return (d[:, None] * r[:, 2:].view(np.int8).astype(np.float64)).reshape(-1)


def decode_nvfp4(raw: U8) -> F64:
    """GGUF blocks, bytes [n/64*36] -> [n], without the tensor's `.scale`.

    Block: 4 scale bytes (E4M3, sign ignored, 0x7F is 0) and 32 bytes; byte j of sub-block s holds
    element 16 s + j (low nibble) and 16 s + 8 + j (high nibble)."""
    r = np.asarray(raw, np.uint8).reshape(-1, 36)
    out = np.empty((len(r), 64))
    for s in range(4):
        d = r[:, s] & 0x7F
        scale = decode_e4m3(np.where(d == 0x7F, 0, d).astype(np.uint8))
        q = r[:, 4 + 8 * s : 12 + 8 * s]
        out[:, 16 * s : 16 * s + 8] = E2M1[q & 15] * scale[:, None]
        out[:, 16 * s + 8 : 16 * s + 16] = E2M1[q >> 4] * scale[:, None]
    return out.reshape(-1)


def decode_modelopt_nvfp4(codes: U8, scales: U8, scale2: float) -> F64:
    """ModelOpt form: codes [N, K/2] (low nibble = even column), E4M3 scales [N, K/16] -> [N, K]"""
    n, half = codes.shape
    w = np.empty((n, 2 * half))
    w[:, 0::2] = E2M1[codes & 15]
    w[:, 1::2] = E2M1[codes >> 4]
    return w * np.repeat(decode_e4m3(scales), 16, axis=1) * float(np.float32(scale2))


def decode_block_fp8(codes: U8, scale: F64, block: int = 128) -> F64:
    """E4M3 [N, K] times scale [ceil(N/block), ceil(K/block)] -> [N, K]"""
    n, k = codes.shape
    spread = np.repeat(np.repeat(scale, block, axis=0), block, axis=1)[:n, :k]
    return decode_e4m3(codes) * spread


# ---------------------------------------------------------------- elementwise and norms


def sigmoid(x: F64) -> F64:
    """1 / (1 + e^-x), without overflow"""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def silu(x: F64) -> F64:
    return x * sigmoid(x)


def softplus(x: F64) -> F64:
    """log(1 + e^x); x itself above 20"""
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


ACTIVATIONS = {"sigmoid": sigmoid, "silu": silu}


def rms_norm(x: F64, weight: F64, eps: float) -> F64:
    """x [..., n], weight [n]: x / sqrt(mean(x^2) + eps) * weight"""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def grouped_rms_norm(x: F64, weight: F64, eps: float, groups: int) -> F64:
    """x [T, groups*n], weight [groups*n]: one statistic per group"""
    parts = x.reshape(len(x), groups, -1)
    return rms_norm(parts, weight.reshape(groups, -1), eps).reshape(x.shape)


def l2_norm(x: F64, eps: float = 1e-6) -> F64:
    """x [..., n]: x / sqrt(sum(x^2) + eps)"""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)


def linear(x: F64, weight: F64, scale: float = 1.0) -> F64:
    """x [T, K], weight [N, K] -> [T, N]"""
    return x @ weight.T * scale


def embed(table: F64, tokens: Sequence[int], streams: int) -> F64:
    """table [V, H] -> [T, S*H]: each row, `streams` times"""
    return np.tile(table[np.asarray(tokens)], (1, streams))


# ---------------------------------------------------------------- residual streams


def residual_mix(
    r: F64,
    norm: F64,
    down: F64,
    up: F64,
    inject: F64 | None,
    eps: float,
    streams: int,
) -> tuple[F64, F64 | None]:
    """Read of the streams. r [T, S*H], norm [S*H], down [low, S*H], up [S*H, low],
    inject [S, S*H] -> (x [T, H], s [T, S])"""
    n = grouped_rms_norm(r, norm, eps, streams)
    low = silu(linear(n, down) / streams)
    gated = sigmoid(linear(low, up)) * n
    x = gated.reshape(len(r), streams, -1).mean(axis=1)
    s = None if inject is None else 2 * sigmoid(linear(n, inject) / streams)
    return x, s


def residual_inject(r: F64, y: F64, s: F64) -> F64:
    """Write: stream i of r [T, S*H] gets s[t, i] * y [T, H]"""
    out = r.reshape(len(r), s.shape[1], -1).copy()
    for i in range(s.shape[1]):
        out[:, i] += s[:, i, None] * y
    return out.reshape(r.shape)


# ---------------------------------------------------------------- convolutions


def dilated_conv(x: F64, history: F64, taps: F64, dilation: int) -> tuple[F64, F64]:
    """Causal depthwise. x [T, C], history [(K-1)*dilation, C] (the rows before, oldest first),
    taps [C, K] (the last is the current token) -> (y [T, C], new history)"""
    k = taps.shape[1]
    rows = np.concatenate([history, x])
    y = np.zeros_like(x)
    for t in range(len(x)):
        for j in range(k):
            y[t] += taps[:, j] * rows[len(history) + t - (k - 1 - j) * dilation]
    return y, rows[len(rows) - (k - 1) * dilation :]


def conv_silu(x: F64, history: F64, taps: F64) -> tuple[F64, F64]:
    """`dilated_conv` with dilation 1, then silu; the history stays raw."""
    y, history = dilated_conv(x, history, taps, 1)
    return silu(y), history


# ---------------------------------------------------------------- gated delta rule


def delta_recurrent(q: F64, k: F64, v: F64, g: F64, beta: F64, state: F64) -> tuple[F64, F64]:
    """One token after the other. q, k [T, heads, Dk] (normalised, q scaled), v [T, heads, Dv],
    g, beta [T, heads], state [heads, Dk, Dv] -> (o [T, heads, Dv], state)"""
    state = state.copy()
    o = np.empty_like(v)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            s = state[h] * math.exp(g[t, h])
            u = beta[t, h] * (v[t, h] - k[t, h] @ s)
            s = s + np.outer(k[t, h], u)
            o[t, h] = q[t, h] @ s
            state[h] = s
    return o, state


def delta_chunked(
    q: F64, k: F64, v: F64, g: F64, beta: F64, state: F64, chunk: int = 64
) -> tuple[F64, F64]:
    """The same map, `chunk` tokens at a time with a triangular solve."""
    state = state.copy()
    o = np.empty_like(v)
    for a in range(0, len(q), chunk):
        e = min(a + chunk, len(q))
        for h in range(q.shape[1]):
            qc, kc, vc, bc = q[a:e, h], k[a:e, h], v[a:e, h], beta[a:e, h]
            c = np.cumsum(g[a:e, h])
            decay = np.tril(np.exp(np.tril(c[:, None] - c[None, :])))
            mix = np.tril(bc[:, None] * (kc @ kc.T) * decay, -1)
            rhs = bc[:, None] * (vc - np.exp(c)[:, None] * (kc @ state[h]))
            u = np.linalg.solve(np.eye(e - a) + mix, rhs)
            o[a:e, h] = np.exp(c)[:, None] * (qc @ state[h]) + (qc @ kc.T * decay) @ u
            state[h] = np.exp(c[-1]) * state[h] + (np.exp(c[-1] - c)[:, None] * kc).T @ u
    return o, state


def delta_inputs(
    y: F64, a: F64, b: F64, decay_rate: F64, dt_bias: F64, key_heads: int, key_dim: int
) -> tuple[F64, F64, F64, F64, F64]:
    """From the convolved projections y [T, C] (all q, all k, all v), a, b [T, Hv],
    decay_rate [Hv] (negative: -exp(A_log)), to (q, k [T, Hk, Dk], v [T, Hv, Dv], g, beta [T, Hv]).
    The caller spreads key heads over value heads."""
    t, kd = len(y), key_heads * key_dim
    q = l2_norm(y[:, :kd].reshape(t, key_heads, key_dim)) / math.sqrt(key_dim)
    k = l2_norm(y[:, kd : 2 * kd].reshape(t, key_heads, key_dim))
    v = y[:, 2 * kd :].reshape(t, a.shape[1], -1)
    return q, k, v, decay_rate * softplus(a + dt_bias), sigmoid(b)


def spread_heads(x: F64, value_heads: int, tiled: bool) -> F64:
    """[T, Hk, D] -> [T, Hv, D]: value head u reads key head u // (Hv/Hk), or u % Hk if tiled
    (the order of a GGUF)."""
    heads = np.arange(value_heads)
    return x[:, heads % x.shape[1] if tiled else heads // (value_heads // x.shape[1])]


def gated_norm(o: F64, z: F64, weight: F64, eps: float, gate: str) -> F64:
    """o, z [T, heads, Dv], weight [Dv]: RMS over a head, times weight, times gate(z)"""
    return rms_norm(o, weight, eps) * ACTIVATIONS[gate](z)


# ---------------------------------------------------------------- attention


def rope(x: F64, positions: Sequence[int], rotary_dim: int, theta: float) -> F64:
    """x [T, heads, D]: rotates dims (j, j + rotary_dim/2) by position * theta^(-2j/rotary_dim);
    dims from rotary_dim on stay. Angles are float32 as in every implementation of the model."""
    half = rotary_dim // 2
    out = x.copy()
    for j in range(half):
        exponent = np.float32(2 * j) / np.float32(rotary_dim)
        inverse = np.float32(1) / np.float32(theta) ** exponent
        for t, p in enumerate(positions):
            angle = float(np.float32(p) * inverse)
            c, s = math.cos(angle), math.sin(angle)
            out[t, :, j] = x[t, :, j] * c - x[t, :, j + half] * s
            out[t, :, j + half] = x[t, :, j + half] * c + x[t, :, j] * s
    return out


def head_norm_rope(
    x: F64, weight: F64, eps: float, positions: Sequence[int], rotary_dim: int, theta: float
) -> F64:
    """x [T, heads, D], weight [D]: RMS norm of each head, then partial RoPE"""
    return rope(rms_norm(x, weight, eps), positions, rotary_dim, theta)


def block_keys(raw: F64, weight: F64, eps: float, ratio: int, rotary_dim: int, theta: float) -> F64:
    """raw index keys [T, D] of a sequence from its start -> one key per complete block,
    [T // ratio, D]: mean, norm, RoPE at the block's first position"""
    blocks = len(raw) // ratio
    mean = raw[: blocks * ratio].reshape(blocks, ratio, raw.shape[1]).mean(axis=1)
    first = [ratio * i for i in range(blocks)]
    return head_norm_rope(mean[:, None], weight, eps, first, rotary_dim, theta)[:, 0]


def block_scores(q: F64, keys: F64) -> F64:
    """q [heads, D] of one token, keys [blocks, D] -> [blocks]: sum over heads of relu(q . key),
    over sqrt(D)"""
    scores: F64 = np.maximum(keys @ q.T, 0).sum(axis=1) / math.sqrt(q.shape[1])
    return scores


def select_blocks(scores: F64, most: int) -> I64:
    """The `most` best blocks, ascending; among equal scores the lower block wins."""
    order = np.argsort(-scores, kind="stable")
    return np.sort(order[:most])


def selected_keys(position: int, scores: F64, most: int, ratio: int) -> I64:
    """Keys that the token at `position` sees: its selected complete blocks and the tail.
    scores [(position + 1) // ratio]"""
    blocks = (position + 1) // ratio
    chosen = select_blocks(scores[:blocks], most)
    tail = range(blocks * ratio, position + 1)
    return np.array([b * ratio + i for b in chosen for i in range(ratio)] + list(tail), np.int64)


def attention(q: F64, k: F64, v: F64, visible: Sequence[I64]) -> F64:
    """q [T, Hq, D], k, v [n, Hkv, D], visible[t]: indices of the keys of token t -> [T, Hq, D].
    Query head h reads KV head h // (Hq/Hkv); scale D^-0.5."""
    rep = q.shape[1] // k.shape[1]
    out = np.empty_like(q)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            kk, vv = k[visible[t], h // rep], v[visible[t], h // rep]
            a = kk @ q[t, h] / math.sqrt(q.shape[2])
            p = np.exp(a - a.max())
            out[t, h] = p @ vv / p.sum()
    return out


# ---------------------------------------------------------------- experts


def route(logits: F64, k: int, renormalise: bool) -> tuple[I64, F64]:
    """logits [T, E] -> (ids [T, k] best first, weights [T, k]): softmax over all experts, the k
    largest (lower id among equals), their sum brought to 1 if `renormalise`"""
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :k]  # stable: lower id first
    w = np.take_along_axis(p, ids, axis=1)
    return ids, w / w.sum(axis=1, keepdims=True) if renormalise else w


def expert_ffn(x: F64, gate: F64, up: F64, down: F64) -> F64:
    """x [T, H], gate, up [F, H], down [H, F] -> [T, H]: down(silu(gate x) * up x)"""
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def experts(x: F64, ids: I64, gate: F64, up: F64, down: F64) -> F64:
    """x [T, H], ids [T, k], gate, up [E, F, H], down [E, H, F] -> [T, k, H]"""
    rows = [
        [expert_ffn(x[t : t + 1], gate[e], up[e], down[e])[0] for e in ids[t]]
        for t in range(len(x))
    ]
    return np.array(rows)


def combine(rows: F64, weights: F64, shared: F64, shared_logit: F64) -> F64:
    """rows [T, k, H], weights [T, k], shared [T, H], shared_logit [T] -> [T, H]: the sum in rank
    order plus sigmoid(shared_logit) * shared"""
    y = np.zeros_like(shared)
    for j in range(rows.shape[1]):
        y += weights[:, j, None] * rows[:, j]
    return y + sigmoid(shared_logit)[:, None] * shared


# ---------------------------------------------------------------- n-gram block


def ngram_rows(
    tokens: Sequence[int],
    context: Sequence[int],
    multipliers: Sequence[int],
    sizes: Sequence[int],
    offsets: Sequence[int],
    boundary: int,
) -> I64:
    """Table rows [T, heads]. context: the len(multipliers)-1 tokens before, oldest first, the
    boundary token where there is none. Heads of the 2-grams come first."""
    n = len(multipliers)
    per = len(sizes) // (n - 1)
    ids = [*context, *tokens]
    out = np.empty((len(tokens), len(sizes)), np.int64)
    for t in range(len(tokens)):
        at = t + n - 1
        window = [ids[at]]
        for s in range(1, n):  # a boundary cuts all that lies before it
            cut = boundary in ids[at - s : at]
            window.append(boundary if cut else ids[at - s])
        mixed = (window[0] * multipliers[0]) % 2**64
        for order in range(2, n + 1):
            mixed ^= (window[order - 1] * multipliers[order - 1]) % 2**64
            for h in range((order - 2) * per, (order - 1) * per):
                out[t, h] = mixed % sizes[h] + offsets[h]
    return out


def ngram_gate(
    key: F64, value: F64, r: F64, norm_key: F64, norm_query: F64, eps: float, streams: int
) -> F64:
    """key, r [T, S*H], value [T, H] -> gated value [T, S*H]; per stream
    u = key . query / sqrt(H), a = sigmoid(sign(u) sqrt(max(|u|, 1e-6)))"""
    hidden = value.shape[1]
    k = grouped_rms_norm(key, norm_key, eps, streams).reshape(len(r), streams, hidden)
    q = grouped_rms_norm(r, norm_query, eps, streams).reshape(len(r), streams, hidden)
    u = (k * q).sum(axis=2) / math.sqrt(hidden)
    a = sigmoid(np.sign(u) * np.sqrt(np.maximum(np.abs(u), 1e-6)))
    return (a[:, :, None] * value[:, None, :]).reshape(r.shape)


def ngram_conv(
    gated: F64, norm: F64, taps: F64, history: F64, eps: float, streams: int, dilation: int
) -> tuple[F64, F64]:
    """gated [T, S*H] -> (gated + silu(conv(norm(gated))), new history of normed rows)"""
    n = grouped_rms_norm(gated, norm, eps, streams)
    y, history = dilated_conv(n, history, taps, dilation)
    return gated + silu(y), history


# ---------------------------------------------------------------- output


def log_softmax(logits: F64) -> F64:
    """[..., V] -> [..., V]"""
    x = logits - logits.max(axis=-1, keepdims=True)
    out: F64 = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return out


def argmax(logits: F64) -> I64:
    """[..., V] -> [...]; the lower id among equals"""
    return np.asarray(np.argmax(logits, axis=-1))


def sample(
    logits: F64,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
    suppressed: Sequence[int],
) -> set[int]:
    """[V] -> the token, or the two or three that roundings of 1e-6 in the filters' limits and 1e-9
    in the random number decide between."""
    x = np.asarray(logits, np.float64).copy()
    x[list(suppressed)] = -np.inf
    if temperature == 0:
        return {int(np.argmax(x))}
    ids = np.flatnonzero(x > -np.inf)
    if top_k or top_p < 1 or min_p:
        ids = ids[np.lexsort((ids, -x[ids]))]
    ids = ids[:top_k] if top_k else ids
    shares = np.cumsum(np.exp(x[ids] - x.max()))
    out = set()
    for slack in (-1e-6, 0, 1e-6):
        kept = ids
        if top_p < 1:
            kept = kept[: np.searchsorted(shares, top_p * (1 + slack) * shares[-1]) + 1]
        if min_p:
            kept = kept[x[kept] >= x.max() + math.log(min_p) + slack]
        sums = np.cumsum(np.exp((x[kept] - x.max()) / temperature))
        for u in (uniform - 1e-9, uniform, uniform + 1e-9):
            at = np.searchsorted(sums, u * sums[-1], side="right")
            out.add(int(kept[min(at, len(kept) - 1)]))
    return out
