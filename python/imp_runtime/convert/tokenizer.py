"""Tokenizer keys of a GGUF, from `tokenizer.json` and the files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer

from imp_runtime.convert.config import read_json
from imp_runtime.convert.errors import ConvertError
from imp_runtime.tokenizer.pretokenizers import PRE_TOKENIZERS


def pre_tokenizer_name(tokenizer: dict[str, Any]) -> str | None:
    """GGUF name of a parsed `tokenizer.json`'s pre-tokenizer, None if it is not a known one."""
    step = tokenizer.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", [step])
    if not steps or steps[-1].get("type") != "ByteLevel":
        return None
    patterns = []
    for split in steps[:-1]:
        pattern = split.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, dict) else None
        if split.get("type") != "Split" or split.get("behavior") != "Isolated" or regex is None:
            return None
        patterns.append(regex)
    if steps[-1].get("use_regex", True):
        patterns += PRE_TOKENIZERS["gpt-2"].patterns
    nfc = (tokenizer.get("normalizer") or {}).get("type") == "NFC"
    whole = bool(tokenizer["model"].get("ignore_merges"))
    for name, entry in PRE_TOKENIZERS.items():
        if (entry.patterns, entry.nfc, entry.ignore_merges) == (tuple(patterns), nfc, whole):
            return name
    return None


def add_tokenizer_keys(
    writer: gguf.GGUFWriter, folder: Path, vocab_size: int, pre: str | None
) -> None:
    """Adds every `tokenizer.*` key, and `imp.eos_token_ids`.

    Raises:
        ConvertError: if the tokenizer is missing, larger than the vocabulary, not a byte-level
            BPE, or has an unknown pre-tokenizer and `pre` does not name one.
    """
    path = folder / "tokenizer.json"
    parsed = read_json(path)
    model = parsed.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise ConvertError(f"{path}: only BPE tokenizers are supported")
    if pre is not None and pre not in PRE_TOKENIZERS:
        raise ConvertError(f"--pre {pre}: one of {', '.join(PRE_TOKENIZERS)} is needed")
    pre = pre or pre_tokenizer_name(parsed)
    if pre is None:
        raise ConvertError(
            f"{path}: its pre-tokenizer is not one that imp knows ({', '.join(PRE_TOKENIZERS)}); "
            "name the one to use with --pre"
        )
    tokens, types = _tokens(path, folder, vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    try:
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)
        special.add_to_gguf(writer, quiet=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConvertError(f"{folder}: its tokenizer files cannot be read: {error}") from error
    for key in ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"):
        if key not in writer.kv_data[0]:
            writer.add_bool(key, False)
    writer.add_array("imp.eos_token_ids", _eos_ids(folder, writer, vocab_size))


def _tokens(path: Path, folder: Path, vocab_size: int) -> tuple[list[str], list[int]]:
    """Token texts and GGUF token types, ids without a token padded."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConvertError(f"{path} cannot be read: {error}") from error
    by_id = {i: text for text, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    largest = max(by_id, default=0)
    if largest >= vocab_size:
        raise ConvertError(f"{path}: token id {largest}, vocab_size is {vocab_size}")
    added = _added_tokens(tokenizer, folder)
    tokens, types = [], []
    for i in range(vocab_size):
        text = by_id.get(i)
        if text is None:
            text, kind = f"[PAD{i}]", gguf.TokenType.UNUSED
        elif i not in added:
            kind = gguf.TokenType.NORMAL
        else:
            normalized, special = added[i]
            if not normalized:  # stored as it reads back
                ids = tokenizer.encode(text, add_special_tokens=False).ids
                text = tokenizer.decode(ids, skip_special_tokens=False)
            looks_special = text.startswith("<|") and text.endswith("|>")
            control = special or looks_special
            kind = gguf.TokenType.CONTROL if control else gguf.TokenType.USER_DEFINED
        tokens.append(text)
        types.append(int(kind))
    return tokens, types


def _added_tokens(tokenizer: Tokenizer, folder: Path) -> dict[int, tuple[bool, bool]]:
    """(normalized, special) of each added token; tokenizer_config.json overrules tokenizer.json."""
    flags = {
        i: (bool(t.normalized), bool(t.special))
        for i, t in tokenizer.get_added_tokens_decoder().items()
    }
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    overrides = config.get("added_tokens_decoder")
    for key, entry in overrides.items() if isinstance(overrides, dict) else ():
        if key.isdecimal() and int(key) in flags and isinstance(entry, dict):
            normalized, special = flags[int(key)]
            flags[int(key)] = (
                bool(entry.get("normalized", normalized)),
                bool(entry.get("special", special)),
            )
    return flags


def _eos_ids(folder: Path, writer: gguf.GGUFWriter, vocab_size: int) -> list[int]:
    """Every token that ends a generation, the tokenizer's own first."""
    ids: list[int] = []
    own = writer.kv_data[0].get("tokenizer.ggml.eos_token_id")
    if own is not None:
        ids.append(int(own.value))
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            listed = json.loads(path.read_bytes()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ConvertError(f"{path} cannot be read: {error}") from None
        listed = listed if isinstance(listed, list) else [listed]
        for i in listed:
            if type(i) is int and i not in ids:
                if not 0 <= i < vocab_size:
                    raise ConvertError(f"{path}: eos_token_id {i}, vocab_size is {vocab_size}")
                ids.append(i)
    return ids
