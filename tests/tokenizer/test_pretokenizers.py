"""The cut of each pre-tokenizer on one text that tells them apart."""

import pytest
from tokenizers import Regex, pre_tokenizers

from imp_runtime.tokenizer.pretokenizers import PRE_TOKENIZERS

TEXT = "I'll DON'T x12345=3!!\n\n  हिन्दी 日本  end \t\n"
CUTS = {
    "qwen35": "I|'ll| DON|'T| x|1|2|3|4|5|=|3|!!\n\n| | हिन्दी| 日本| | end| \t\n",
    "qwen2": "I|'ll| DON|'T| x|1|2|3|4|5|=|3|!!\n\n| | ह|िन|्द|ी| 日本| | end| \t\n",
    "llama-bpe": "I|'ll| DON|'T| x|123|45|=|3|!!\n\n| | ह|िन|्द|ी| 日本| | end| \t\n",
    "gpt-2": "I|'ll| DON|'|T| x|12345|=|3|!!|\n\n | ह|ि|न|्|द|ी| 日本| | end| \t\n",
    "smollm": "I|'ll| DON|'|T| x|1|2|3|4|5|=|3|!!|\n\n | ह|ि|न|्|द|ी| 日本| | end| \t\n",
    "deepseek-v3": "I|'ll| DON|'T| x|123|45|=|3|!!\n\n| | हिन्दी| |日本| | end| \t\n",
    "deepseek-coder": (
        "I|'|ll| DON|'|T| x|1|2|3|4|5|=|3|!!|\n|\n| | |ह|ि|न|्|द|ी| |日本| | end| \t|\n"
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_cut(name: str) -> None:
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in PRE_TOKENIZERS[name].patterns]
    pieces = [p for p, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(TEXT)]
    assert "|".join(pieces) == CUTS[name]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_nothing_is_lost(name: str) -> None:
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in PRE_TOKENIZERS[name].patterns]
    pieces = [p for p, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(TEXT)]
    assert "".join(pieces) == TEXT


def test_only_qwen_is_normalised() -> None:
    assert {n for n, p in PRE_TOKENIZERS.items() if p.nfc} == {
        "qwen35",
        "qwen2",
        "deepseek-r1-qwen",
    }
