"""Makes tests/models/golden/*.npz, the results that the model tests compare with.

    python tools/make_golden.py --reference DIR [--transformers] [--prose FILE] [RECIPE ...]

The numbers come from an implementation of the model that shares no code with this project:
DIR holds `ref_qwen4exp.py`, numpy in float64. `--transformers` also runs Hugging Face's classes on
the same weights (needs torch and transformers >= 5.23) and records how far the two are apart;
without it the recorded agreement of the file that is there is kept. `--prose FILE` packs the
stored log-probs of transformers on the shipped model's held-out text.

A golden file holds, for each sequence s of `long`, `short`, `one`:
  s.tokens [T]; s.positions [P] and s.logits [P, V] there; s.logprob [T-1] of the next token;
  s.argmax [T]; and for `long`:
  long.tap_positions [Q] and long.<tap> [Q, width] for blk.N.attn_out, blk.N.ffn_out (before the
  write), blk.N.residual (after the layer), result_norm; long.ngram_rows.N [T, heads];
  long.experts.N [T, k] in rank order; mtp.positions, mtp.logits: pair i is (t_{i+1}, residual i).
The tokens are chosen so that no decision is close: at every token and layer the last expert chosen
leads the first one left out by `router_gap` in logits, the last block by `block_gap` relative to
its score (both in `meta`), so float32 implementations choose the same."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.models import checkpoint, tiny, tiny_tokenizer  # noqa: E402
from tests.models.tiny_bytes import Draw  # noqa: E402

GOLDEN = ROOT / "tests" / "models" / "golden"
EOS, IM_END = tiny_tokenizer.END_OF_TEXT, tiny_tokenizer.IM_END
LONG, SHORT = 190, 9  # 190: three delta chunks, 47 index blocks and a tail
BOUNDARIES = {5: EOS, 6: EOS, 20: IM_END, 63: EOS, 64: EOS, 100: EOS, 131: EOS}
LOGIT_POSITIONS = (
    0,
    1,
    3,
    4,
    5,
    6,
    7,
    34,
    35,
    36,
    62,
    63,
    64,
    65,
    99,
    127,
    128,
    129,
    160,
    188,
    189,
)
TAP_POSITIONS = (7, 189)
MTP_POSITIONS = (0, 6, 64, 127, 188)
ROUTER_GAP, BLOCK_GAP = 2e-3, 1e-3


class Golden:
    """One sequence run through the reference with taps and decision margins."""

    def __init__(self, ref: ModuleType, c: dict[str, Any], w: dict[str, np.ndarray]) -> None:
        self.ref, self.qsa = ref, "indexer_n_heads" in c
        names = [n for n in ref.Cfg.__dataclass_fields__ if n in c and n != "dtype"]
        kw = {n: c[n] for n in names}
        rope, eos = c["rope_parameters"], c["eos_token_id"]
        kw["rope_theta"] = rope["rope_theta"]
        kw["partial_rotary_factor"] = rope["partial_rotary_factor"]
        kw["mrope_section"] = tuple(rope["mrope_section"])
        kw["eos_token_id"] = eos[0] if isinstance(eos, list) else eos
        kw["ple_layer_ids"] = tuple(c.get("ple_layer_ids") or ())
        self.cfg = ref.Cfg(dtype=np.float64, **kw)
        self.w = w = dict(w)
        w.setdefault("lm_head.weight", w["embed_tokens.weight"])
        if not self.qsa:  # the reference always computes index keys; use_qsa ignores them
            cfg = self.cfg
            cfg.indexer_head_dim = cfg.rotary_dim
            for i in range(cfg.num_hidden_layers):
                p = f"layers.{i}.self_attn.indexer."
                rows = (cfg.indexer_n_heads + 1) * cfg.rotary_dim
                w[p + "index_qk_proj.weight"] = np.zeros((rows, cfg.hidden_size))
                w[p + "q_layernorm.weight"] = w[p + "k_layernorm.weight"] = np.zeros(cfg.rotary_dim)
        self.ple = sorted(set(self.cfg.ple_layer_ids))

    def layer(self, p: str, tap: str, kind: str, r: np.ndarray, st: Any, i: int) -> np.ndarray:
        ref, cfg, w = self.ref, self.cfg, self.w
        cos, sin = ref.rope_tables(cfg, st.positions)
        x, s = ref.hc_read(cfg, w, p + "attn_hyper_connection.", r)
        if kind == "linear_attention":
            y = ref.gdn_layer(cfg, w, p + "linear_attn.", x, st, i)
        else:
            a = p + "self_attn."
            y = ref.attn_layer(cfg, w, a, x, st, i, cos, sin, self.qsa)
            if self.qsa:
                self.block_margin(a + "indexer.", x, st, i, cos, sin)
        r = ref.hc_write(cfg, r, y, s)
        self.taps[tap + "attn_out"] = y
        x, s = ref.hc_read(cfg, w, p + "mlp_hyper_connection.", r)
        logits = x @ w[p + "mlp.gate.weight"].T
        k = cfg.num_experts_per_tok
        order = np.argsort(-logits, axis=1, kind="stable")
        self.taps[tap + "experts"] = order[:, :k]
        if k < cfg.num_experts:
            ranked = np.take_along_axis(logits, order, 1)
            self.router_gap = min(self.router_gap, float((ranked[:, k - 1] - ranked[:, k]).min()))
        y = ref.moe(cfg, w, p + "mlp.", x)
        r = ref.hc_write(cfg, r, y, s)
        self.taps[tap + "ffn_out"] = y
        self.taps[tap + "residual"] = r
        return r

    def block_margin(self, p: str, x: np.ndarray, st: Any, i: int, cos: Any, sin: Any) -> None:
        ref, cfg = self.ref, self.cfg
        t, heads, d = len(x), cfg.indexer_n_heads, cfg.indexer_head_dim
        at, most = st.pos, cfg.indexer_budget // cfg.indexer_compress_ratio
        q = (x @ self.w[p + "index_qk_proj.weight"].T)[:, : heads * d].reshape(t, heads, d)
        q = ref.norm1p(q, self.w[p + "q_layernorm.weight"], cfg.rms_norm_eps)
        q = ref.rope(q, cos[at : at + t], sin[at : at + t])
        keys = ref.block_keys(cfg, st.ik[i], self.w[p + "k_layernorm.weight"], cos, sin)
        for j in range(t):
            n = (at + j + 1) // cfg.indexer_compress_ratio
            if n > most:
                s = np.sort(np.maximum(keys[:n] @ q[j].T, 0).sum(1))[::-1]
                gap = 0.0 if s[most - 1] == 0 else float((s[most - 1] - s[most]) / s[most - 1])
                self.block_gap = min(self.block_gap, gap)

    def step(self, tokens: list[int], st: Any) -> tuple[np.ndarray, np.ndarray]:
        """Runs tokens after what st holds: (logits [T, V], streams [T, S*H]); fills taps, gaps."""
        ref, cfg = self.ref, self.cfg
        self.taps: dict[str, np.ndarray] = {}
        self.router_gap = self.block_gap = np.inf
        st.positions += [(p, p, p) for p in range(st.pos, st.pos + len(tokens))]
        r = np.tile(self.w["embed_tokens.weight"][tokens], (1, cfg.hc_count))
        context = list(st.ngram)
        for i, kind in enumerate(cfg.layer_types):
            if i + 1 in self.ple:
                index = self.ple.index(i + 1)
                p = f"layers.{i}.ple."
                r = r + ref.ple_layer(cfg, self.w, p, r, tokens, context, st, i, index)
                constants = ref.ngram_constants(cfg, index)
                self.taps[f"ngram_rows.{i}"] = ref.ngram_rows(cfg, tokens, context, constants)
            r = self.layer(f"layers.{i}.", f"blk.{i}.", kind, r, st, i)
        st.ngram = (context + tokens)[-(cfg.ngram_size - 1) :]
        st.pos += len(tokens)
        h, _ = ref.hc_read(cfg, self.w, "hyper_connection_mixer.", r)
        self.taps["result_norm"] = h
        return h @ self.w["lm_head.weight"].T, r

    def choose(self, name: str, count: int, forced: dict[int, int]) -> list[int]:
        """Random tokens whose every decision has a margin; forced[i] is tried first at i."""
        st = self.ref.State(self.cfg)
        tokens: list[int] = []
        draws = Draw(f"golden/{name}").u16("tokens", 64 * count).reshape(count, 64)
        for i in range(count):
            first = [forced[i]] if i in forced else []
            for t in first + [int(d) % tiny_tokenizer.TOKENS for d in draws[i]]:
                trial = st.clone()
                self.step([t], trial)
                if self.router_gap > ROUTER_GAP and self.block_gap > BLOCK_GAP:
                    break
            else:
                raise SystemExit(f"{name}: no token with a margin at {i}")
            tokens.append(t)
            st = trial
        return tokens


def log_softmax(x: np.ndarray) -> np.ndarray:
    m = x.max(-1, keepdims=True)
    return x - m - np.log(np.exp(x - m).sum(-1, keepdims=True))


def check_decoding(ref: ModuleType, folder: Path, w: dict[str, np.ndarray]) -> None:
    """The checkpoint reader must decode NVFP4 and block FP8 as the reference does."""
    raw = checkpoint.raw_tensors(folder)
    for name, (dtype, shape, data) in raw.items():
        if dtype == "U8":
            _, s, scale = raw[name + "_scale"]
            scale2 = raw[name + "_scale_2"][2].view("<f4")[0]
            want = ref.nvfp4_hf_dequant(data.reshape(shape), scale.reshape(s), scale2)
        elif name + "_scale_inv" in raw:
            _, s, inv = raw[name + "_scale_inv"]
            inv = (inv.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(s)
            want = ref.fp8_block_dequant(data.reshape(shape), inv)
        else:
            continue
        p, e, part = name.removeprefix("model.language_model.").rsplit(".", 3)[:3]
        stack = w[p + (".down_proj" if part == "down_proj" else ".gate_up_proj")][int(e)]
        n = len(want)
        got = stack[n:] if part == "up_proj" else stack[:n]
        if not np.allclose(got, want, rtol=3e-7, atol=0):
            raise SystemExit(f"{name}: the reader and the reference decode it differently")


def make(ref: ModuleType, name: str, transformers: bool) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        folder = tiny.write(tmp, name)
        digest = tiny.digest(folder)
        c, w = checkpoint.load(folder)
        check_decoding(ref, folder, w)
    g = Golden(ref, c, w)
    out: dict[str, Any] = {}
    sequences = {
        "long": g.choose(name, LONG, BOUNDARIES),
        "short": g.choose(name + "/short", SHORT, {0: EOS, 3: EOS, 4: EOS}),
        "one": g.choose(name + "/one", 1, {}),
    }
    runs, streams, gaps = {}, {}, [np.inf, np.inf]
    for s, tokens in sequences.items():
        runs[s], streams[s] = g.step(tokens, ref.State(g.cfg))
        gaps = [min(gaps[0], g.router_gap), min(gaps[1], g.block_gap)]
        at = [p for p in LOGIT_POSITIONS if p < len(tokens)] if s == "long" else range(len(tokens))
        out |= {
            f"{s}.tokens": np.array(tokens, np.int32),
            f"{s}.positions": np.array(at, np.int32),
            f"{s}.logits": runs[s][list(at)].astype(np.float32),
            f"{s}.argmax": runs[s].argmax(1).astype(np.int32),
        }
        logp = log_softmax(runs[s])
        nxt = [logp[i, t] for i, t in enumerate(tokens[1:])]
        out[f"{s}.logprob"] = np.array(nxt, np.float32)
        if s != "long":
            continue
        out["long.tap_positions"] = np.array(TAP_POSITIONS, np.int32)
        for tap, x in g.taps.items():
            if tap.endswith(".experts"):
                if int(tap.split(".")[1]) in (0, g.cfg.num_hidden_layers - 1):
                    out["long.experts." + tap.split(".")[1]] = x.astype(np.int16)
            elif tap.startswith("ngram_rows"):
                out["long." + tap] = x.astype(np.int32)
            else:
                out["long." + tap] = x[list(TAP_POSITIONS)].astype(np.float32)
    tokens = sequences["long"]
    if c["mtp_num_hidden_layers"]:
        mtp, _ = ref.mtp_forward(g.cfg, g.w, tokens[1:], streams["long"][:-1], ref.State(g.cfg))
        out["mtp.positions"] = np.array(MTP_POSITIONS, np.int32)
        out["mtp.logits"] = mtp[list(MTP_POSITIONS)].astype(np.float32)
    path = GOLDEN / f"{name}.npz"
    agreement = {}
    if transformers:
        hf = importlib.import_module("tools.golden_transformers")
        agreement = hf.compare(c, g.w, sequences, runs)
    elif path.exists():
        agreement = json.loads(str(np.load(path)["meta"]))["agreement"]
    meta = {
        "source": "numpy float64 reference, independent of this project",
        "checkpoint_sha256": digest,
        "router_gap": None if np.isinf(gaps[0]) else gaps[0],
        "block_gap": None if np.isinf(gaps[1]) else gaps[1],
        "max_abs_logit": float(np.abs(runs["long"]).max()),
        "agreement": agreement,
    }
    np.savez_compressed(path, meta=np.array(json.dumps(meta)), **out)
    print(f"{path.name}: {path.stat().st_size} bytes, {json.dumps(meta)}")


def make_prose(source: Path) -> None:
    """golden/prose.npz, from transformers (fp32) on the shipped model with its quantised weights
    decoded: tokens [2048] of held-out text, logprob [2047] as one context (the indexer is active),
    logprob_windows [4, 511] as four contexts, argmax [2048]; perplexities in meta."""
    d = json.loads(source.read_text())
    n = d["nvfp4_dequantised"]
    out = {
        "tokens": np.array(d["token_ids_2048_austen"], np.int16),
        "logprob": np.array(n["logprob_single_context_2048_qsa"], np.float32),
        "logprob_windows": np.array(n["logprob_4_windows_of_512_dense"], np.float32),
        "argmax": np.array(n["argmax_single_context_2048"], np.int16),
    }
    meta = {
        "about": d["about"],
        "ppl_c512_first_40_windows": {k: v["transformers"] for k, v in n["ppl512"].items()},
        "ppl_c512_whole_file": {
            "austen": d["bars"]["austen_c512_transformers_nvfp4"],
            "tech": d["bars"]["tech_c512_transformers_nvfp4"],
        },
        "ppl_c512_whole_file_llama_cpp": {
            "austen": d["bars"]["austen_c512_llama_cpp_nvfp4"],
            "tech": d["bars"]["tech_c512_llama_cpp_nvfp4"],
        },
        "windows": d["bars"]["windows"],
        "greedy": n["greedy"],
    }
    path = GOLDEN / "prose.npz"
    np.savez_compressed(path, meta=np.array(json.dumps(meta)), **out)
    print(f"{path.name}: {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reference", type=Path, required=True, help="folder of ref_qwen4exp.py")
    parser.add_argument("--transformers", action="store_true", help="compare with transformers")
    parser.add_argument("--prose", type=Path, help="reference.json of the shipped model")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="default: all")
    a = parser.parse_args()
    sys.path.insert(0, str(a.reference))
    ref = importlib.import_module("ref_qwen4exp")
    GOLDEN.mkdir(exist_ok=True)
    for name in a.recipes or tiny.RECIPES:
        make(ref, name, a.transformers)
    if a.prose:
        make_prose(a.prose)


if __name__ == "__main__":
    main()
