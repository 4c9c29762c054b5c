"""How far Hugging Face's qwen4_exp is from the golden logits; needs torch, transformers 5.23."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

DENSE = {  # the classes always have an indexer; this one never leaves a block out
    "indexer_n_heads": 1,
    "indexer_kv_heads": 1,
    "indexer_budget": 1 << 20,
    "indexer_compress_ratio": 4,
}


def model(c: dict[str, Any], w: dict[str, np.ndarray], dtype: torch.dtype) -> Any:
    """The text model with the arrays w; every parameter and buffer must be given."""
    c = dict(c)
    if "indexer_n_heads" not in c:
        factor = c["rope_parameters"]["partial_rotary_factor"]
        c |= DENSE | {"indexer_head_dim": int(c["head_dim"] * factor)}
    config = Qwen4ExpTextConfig(**{k: v for k, v in c.items() if k != "architectures"})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    m = Qwen4ExpForCausalLM(config).to(dtype).eval()
    state = m.state_dict()
    with torch.no_grad():
        for name, t in state.items():
            short = name.removeprefix("model.")
            if "indexer." in name and not w[short].any():
                continue  # the dense model: any index weights
            if tuple(w[short].shape) != tuple(t.shape):
                raise SystemExit(f"{name}: {w[short].shape} here, {tuple(t.shape)} there")
            t.copy_(torch.from_numpy(np.ascontiguousarray(w[short])))
    return m


def compare(
    c: dict[str, Any],
    w: dict[str, np.ndarray],
    sequences: dict[str, list[int]],
    runs: dict[str, np.ndarray],
) -> dict[str, Any]:
    """Largest |difference| of the logits over all positions, in float32 and float64."""
    out: dict[str, Any] = {"transformers": transformers.__version__}
    for dtype in (torch.float32, torch.float64):
        m = model(c, w, dtype)
        worst = 0.0
        for s, tokens in sequences.items():
            with torch.no_grad():
                got = m(torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()
            worst = max(worst, float(np.abs(got - runs[s]).max()))
        out[f"max_abs_difference_{str(dtype).removeprefix('torch.')}"] = worst
    return out
