"""The tokenizer of the tiny checkpoints: byte-level BPE with 40 merges and the qwen35 split."""

from __future__ import annotations

import json
from pathlib import Path

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# "_" stands for the byte-level space.
MERGES = (
    "_ t,_ a,h e,i n,r e,o n,_t he,e r,_ s,a t,_ w,_ o,e n,i t,o r,_ c,e s,i s,n d,_ b,_ f,o u,"
    "_ p,in g,_a nd,a l,e d,a r,_ m,_o f,_ in,_t o,l l,_ h,_ d,a n,ou t,_the re,_w it,_wit h"
).split(",")
SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TOKENS = 256 + len(MERGES) + len(SPECIALS)  # 304
END_OF_TEXT = 256 + len(MERGES)
IM_START, IM_END = END_OF_TEXT + 1, END_OF_TEXT + 2
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = (END_OF_TEXT + i for i in (3, 4, 6, 7))
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins: the character of each byte 0..255."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    table = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    return [table[b] for b in range(256)]


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json, generation_config.json, chat_template.jinja"""
    space = byte_alphabet()[32]
    merges = [m.replace("_", space).split(" ") for m in MERGES]
    words = sorted(byte_alphabet()) + ["".join(m) for m in merges]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": END_OF_TEXT + i, "content": text, **flags, "special": True}
        for i, text in enumerate(SPECIALS)
    ]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {w: i for i, w in enumerate(words)},
            "merges": merges,
        },
    }
    decoder = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "additional_special_tokens": SPECIALS[1:],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    generation = {
        "bos_token_id": END_OF_TEXT,
        "do_sample": True,
        "eos_token_id": [IM_END, END_OF_TEXT],
        "pad_token_id": END_OF_TEXT,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }
    for name, value in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(value, indent=1, ensure_ascii=False), "utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
