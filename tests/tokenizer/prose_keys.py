"""Tokenizer keys of a GGUF file, made from a checkpoint's files as a converter would."""

import json
from pathlib import Path

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def keys_of(model: Path, padding: int = 4) -> dict[str, object]:
    data = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {int(i): t["special"] for i, t in config["added_tokens_decoder"].items()}
    ids = dict(data["model"]["vocab"])
    types = dict.fromkeys(ids.values(), NORMAL)
    for token in data["added_tokens"]:
        ids[token["content"]] = token["id"]
        types[token["id"]] = CONTROL if special[token["id"]] else USER_DEFINED
    size = len(ids)
    for i in range(size, size + padding):
        ids[f"[PAD{i}]"] = i
        types[i] = UNUSED
    by_id = sorted(ids, key=ids.__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": by_id,
        "tokenizer.ggml.token_type": [types[i] for i in range(size + padding)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": ids["<|endoftext|>"],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
        "tokenizer.ggml.add_bos_token": False,
    }
