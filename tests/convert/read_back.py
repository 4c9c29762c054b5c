"""A GGUF back to checkpoint modules, with gguf-py and ml_dtypes only: the transforms undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from tests.convert.builder import Built


class ReadBack:
    """Values of a GGUF in checkpoint order, float32."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)
        self.tensors = {t.name: t for t in self.reader.tensors}

    def key(self, name: str) -> Any:
        """The value of a metadata key."""
        return self.reader.fields[name].contents()

    def type(self, name: str) -> str:
        """ggml's name of a tensor's type."""
        return str(self.tensors[name].tensor_type.name)

    def raw(self, name: str) -> np.ndarray:
        """Values in torch order, `.scale` applied."""
        t = self.tensors[name]
        shape = [int(n) for n in reversed(t.shape)]
        if t.tensor_type is gguf.GGMLQuantizationType.I8:
            values = np.asarray(t.data).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        else:
            values = np.asarray(gguf.dequantize(t.data, t.tensor_type), np.float32)
        values = values.reshape(shape)
        bare = name.removesuffix(".weight_e4m3").removesuffix(".weight")
        scale = self.tensors.get(f"{bare}.scale")
        if scale is None:
            return values
        factors = np.asarray(scale.data, np.float32).reshape(-1, *[1] * (values.ndim - 1))
        return values * (factors if len(factors) > 1 else factors.reshape(()))

    def modules(self, text: dict[str, Any]) -> dict[str, np.ndarray]:
        """Every module of the model that the file holds."""
        out = {"embed_tokens": self.raw("token_embd.weight")}
        if "output.weight" in self.tensors:
            out["lm_head"] = self.raw("output.weight")
        self._hyper(out, "hyper_connection_mixer.", "output_hc_", inject=False)
        layers = text["num_hidden_layers"]
        for i, kind in enumerate(text["layer_types"]):
            self._layer(out, f"layers.{i}.", f"blk.{i}.", kind == "linear_attention", text)
        for index, one_based in enumerate(sorted(text["ple_layer_ids"])):
            self._ngram(out, f"layers.{one_based - 1}.ple.", f"blk.{one_based - 1}.", index)
        if f"blk.{layers}.nextn.eh_proj.weight" in self.tensors:
            self._layer(out, "mtp.layers.0.", f"blk.{layers}.", False, text)
            self._mtp(out, f"blk.{layers}.nextn.")
        return out

    def _hyper(self, out: dict[str, np.ndarray], m: str, g: str, *, inject: bool = True) -> None:
        out[m + "hc_norm"] = self.raw(g + "norm.weight") - 1
        out[m + "input_mix_weight_down"] = self.raw(g + "down.weight")
        out[m + "input_mix_weight_up"] = self.raw(g + "up.weight")
        if inject:
            out[m + "block_inject_weight"] = self.raw(g + "inject.weight")

    def _layer(
        self, out: dict[str, np.ndarray], m: str, g: str, delta: bool, text: dict[str, Any]
    ) -> None:
        self._hyper(out, m + "attn_hyper_connection.", g + "hc_attn_")
        self._hyper(out, m + "mlp_hyper_connection.", g + "hc_ffn_")
        if delta:
            self._delta(out, m + "linear_attn.", g, text)
        else:
            self._attention(out, m + "self_attn.", g)
        out[m + "mlp.gate"] = self.raw(g + "ffn_gate_inp.weight")
        out[m + "mlp.shared_expert_gate"] = self.raw(g + "ffn_gate_inp_shexp.weight").reshape(1, -1)
        for part in ("gate", "up", "down"):
            out[f"{m}mlp.shared_expert.{part}_proj"] = self.raw(f"{g}ffn_{part}_shexp.weight")
            out[f"{m}mlp.experts.{part}"] = self.raw(f"{g}ffn_{part}_exps.weight")

    def _attention(self, out: dict[str, np.ndarray], m: str, g: str) -> None:
        for a, b in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "output")):
            out[m + a] = self.raw(f"{g}attn_{b}.weight")
        for a, b in (("q_norm", "attn_q_norm"), ("k_norm", "attn_k_norm")):
            out[m + a] = self.raw(f"{g}{b}.weight") - 1
        if f"{g}indexer.q_proj.weight" in self.tensors:
            parts = [self.raw(f"{g}indexer.{x}_proj.weight") for x in "qk"]
            out[m + "indexer.index_qk_proj"] = np.concatenate(parts)
            for x in "qk":
                out[f"{m}indexer.{x}_layernorm"] = self.raw(f"{g}indexer.{x}_norm.weight") - 1

    def _delta(self, out: dict[str, np.ndarray], m: str, g: str, text: dict[str, Any]) -> None:
        keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
        start = 2 * keys * text["linear_key_head_dim"]

        def grouped(x: np.ndarray, first: int = 0) -> np.ndarray:
            """Rows from tiled [repeat, key head, d] to grouped [key head, repeat, d] order."""
            tail = x[first:].reshape(values // keys, keys, -1, *x.shape[1:])
            return np.concatenate([x[:first], tail.swapaxes(0, 1).reshape(x[first:].shape)])

        out[m + "in_proj_qkv"] = grouped(self.raw(g + "attn_qkv.weight"), start)
        out[m + "in_proj_z"] = grouped(self.raw(g + "attn_gate.weight"))
        out[m + "in_proj_a"] = grouped(self.raw(g + "ssm_alpha.weight"))
        out[m + "in_proj_b"] = grouped(self.raw(g + "ssm_beta.weight"))
        out[m + "conv1d"] = grouped(self.raw(g + "ssm_conv1d.weight"), start)[:, None]
        out[m + "dt_bias"] = grouped(self.raw(g + "ssm_dt.bias"))
        out[m + "A_log"] = grouped(np.log(-self.raw(g + "ssm_a")))
        out[m + "norm"] = self.raw(g + "ssm_norm.weight")
        out[m + "out_proj"] = grouped(self.raw(g + "ssm_out.weight").T).T

    def _ngram(self, out: dict[str, np.ndarray], m: str, g: str, index: int) -> None:
        table = ("" if index == 0 else g) + "per_layer_token_embd.weight"
        exact = f"{table}_e4m3"
        out[m + "ple_embedding.ngram_embedding"] = self.raw(
            exact if exact in self.tensors else table
        )
        for part in ("key", "value"):
            out[f"{m}{part}_proj"] = self.raw(f"{g}ple_{part}.weight")
        for part in ("norm_key", "norm_query", "norm_conv"):
            out[m + part] = self.raw(f"{g}ple_{part}.weight") - 1
        out[m + "conv1d"] = self.raw(g + "ple_conv1d.weight")[:, None]

    def _mtp(self, out: dict[str, np.ndarray], g: str) -> None:
        both = self.raw(g + "eh_proj.weight")
        half = both.shape[1] // 2
        out["mtp.fc_embedding"], out["mtp.fc_hidden"] = both[:, :half], both[:, half:]
        out["mtp.pre_fc_norm_embedding"] = self.raw(g + "enorm.weight") - 1
        out["mtp.pre_fc_norm_hidden"] = self.raw(g + "hnorm.weight") - 1
        self._hyper(out, "mtp.hyper_connection_mixer.", g + "hc_head_", inject=False)


def compare(path: Path, built: Built, rounded: dict[str, float] | None = None) -> set[str]:
    """Asserts that a GGUF has the values of `built`; returns the modules compared.

    rounded: largest relative error by a part of the module's name; everything else is exact, but
    for norms and decays, whose inverse (x - 1, log) rounds once more in float32.
    """
    got = ReadBack(path).modules(built.text)
    for module, values in got.items():
        wanted = built.values[module]
        assert values.shape == wanted.shape, module
        limit = max((r for part, r in (rounded or {}).items() if part in module), default=0.0)
        if module.endswith(("norm", "A_log", "norm_key", "norm_query", "norm_conv")) or (
            "pre_fc_norm" in module
        ):
            np.testing.assert_allclose(values, wanted, rtol=0, atol=3e-7, err_msg=module)
        elif limit:
            np.testing.assert_allclose(values, wanted, rtol=limit, atol=1e-12, err_msg=module)
        else:
            np.testing.assert_array_equal(values, wanted, err_msg=module)
    return set(got)
