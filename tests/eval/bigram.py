"""A model whose logits depend on the last token only, its text, and its GGUF for llama.cpp."""

import numpy as np

WORDS = (
    "the quick brown fox jumps over the lazy dog while seven wizards brew potions by moonlight "
    "and nobody asks why the kettle sings before dawn but everyone hums along in quiet harmony "
    "as jackdaws love my big sphinx of quartz and the five boxing wizards jump quickly to verify "
)
LETTERS = " abcdefghijklmnopqrstuvwxyz"
FIRST_LETTER = 3  # ids 0 to 2: unknown, begin, end
ODD_VOCAB, EVEN_VOCAB = 33, 34


def encode(text: str) -> list[int]:
    return [FIRST_LETTER + LETTERS.index(letter) for letter in text]


def table(n_vocab: int, variant: int) -> np.ndarray:
    """Logits float32 [last token, next token]; every other row spans more than 16 nats."""
    i, j = np.mgrid[:n_vocab, :n_vocab]
    base = ((i * 7919 + j * 10473 + i * j * 31) % 1009) / 128 - 4
    base[::2] *= 4
    if variant:
        base += ((i * 131 + j * 577 + i * j * variant) % 97) / 128
    return base.astype(np.float32)


class Model:
    context_length = 64

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]

    def close(self) -> None:
        pass


class Sequence:
    def __init__(self, session: "Session", seq: int) -> None:
        self.session, self.id = session, seq
        self.length = 0
        session.open_sequences[seq] = self

    def close(self) -> None:
        del self.session.open_sequences[self.id]


class Session:
    """Records every piece of a step and the number of pieces; counts open sequences."""

    n_ubatch = 512

    def __init__(self, model: Model) -> None:
        self.model = model
        self.core = self
        self.calls: list = []  # of a piece: tokens before it, its tokens, outputs
        self.steps: list[int] = []  # pieces
        self.open_sequences: dict[int, Sequence] = {}
        self.opened = self.most_open = 0

    @property
    def n_open(self) -> int:
        return len(self.open_sequences)

    def open(self) -> Sequence:
        self.opened += 1
        sequence = Sequence(self, self.opened)
        self.most_open = max(self.most_open, self.n_open)
        return sequence

    def step(self, requests: list) -> np.ndarray:
        assert sum(len(tokens) for _, tokens, _ in requests) <= self.n_ubatch
        self.steps.append(len(requests))
        wanted = []
        for seq, tokens, first in requests:
            sequence = self.open_sequences[seq]
            self.calls.append((sequence.length, tokens.tolist(), len(tokens) - first))
            sequence.length += len(tokens)
            wanted.append(tokens[first:])
        return self.model.logits[np.concatenate(wanted)]


def write_gguf(path: str, logits: np.ndarray, add_bos: bool) -> None:
    """The same model in llama.cpp's `llama` architecture, its attention and FFN adding zero.

    A token's embedding is 8 * one-hot, which RMS normalisation leaves as it is, so the logits are
    the table's float32 values exactly.
    """
    import gguf

    n_vocab, width = len(logits), 64
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(1e-30)
    writer.add_vocab_size(n_vocab)
    words = ["<unk>", "<s>", "</s>", *LETTERS.replace(" ", "▁")]
    words += [f"[PAD{n}]" for n in range(len(words), n_vocab)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * n_vocab)
    writer.add_token_types([2, 3, 3] + [1] * len(LETTERS) + [5] * (n_vocab - 3 - len(LETTERS)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(add_bos)
    writer.add_add_space_prefix(False)

    def add(name: str, array: np.ndarray) -> None:
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))

    add("token_embd.weight", 8 * np.eye(n_vocab, width))
    add("output_norm.weight", np.ones(width))
    add("output.weight", np.pad(logits.T / 8, ((0, 0), (0, width - n_vocab))))
    for norm in ("attn_norm", "ffn_norm"):
        add(f"blk.0.{norm}.weight", np.ones(width))
    for linear in ("attn_q", "attn_k", "attn_v", "attn_output"):
        add(f"blk.0.{linear}.weight", np.zeros((width, width)))
    add("blk.0.ffn_gate.weight", np.zeros((32, width)))
    add("blk.0.ffn_up.weight", np.zeros((32, width)))
    add("blk.0.ffn_down.weight", np.zeros((width, 32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
