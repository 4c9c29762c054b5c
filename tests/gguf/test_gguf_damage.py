"""Whatever happened to a file, it opens or raises ImpError, and at once."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imp_runtime import ImpError
from imp_runtime.gguf import Gguf, describe
from tests.gguf.gguf_files import Writer, small

DEADLINE_MS = 1000
FAST = settings(
    deadline=DEADLINE_MS,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("valid") / "f.gguf"
    small(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def only_keys(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The keys of an architecture that imp runs."""
    path = tmp_path_factory.mktemp("keys") / "f.gguf"
    with Writer(path, "qwen4exp") as w:
        a = "qwen4exp."
        for key, value in {
            "block_count": 8,
            "context_length": 8192,
            "embedding_length": 128,
            "vocab_size": 300,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "rope.dimension_count": 16,
            "ssm.conv_kernel": 4,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 6,
            "ssm.state_size": 32,
            "ssm.inner_size": 192,
            "hyper_connection.count": 4,
            "hyper_connection.low_rank": 32,
            "expert_count": 16,
            "expert_used_count": 4,
            "expert_feed_forward_length": 64,
            "expert_shared_feed_forward_length": 64,
        }.items():
            w.add_uint32(a + key, value)
        w.add_float32(a + "attention.layer_norm_rms_epsilon", 1e-6)
        w.add_float32(a + "rope.freq_base", 1e7)
    return path.read_bytes()


def touch(path: Path) -> None:
    """Open the file and read all of it, or fail with ImpError."""
    try:
        file = Gguf.open(path)
    except ImpError as error:
        assert error.code in ("bad_file", "unsupported", "io")
        assert "\n" not in str(error)
        return
    assert len(file.keys()) == len(file.key_types())
    for tensor in file.tensors():
        assert len(file.data(tensor.name).tobytes()) == tensor.n_bytes
    description = describe(path)
    assert description.active_parameters <= description.parameters


def test_the_undamaged_files_open(tmp_path: Path, valid: bytes, only_keys: bytes) -> None:
    for content, architecture in ((valid, "test"), (only_keys, "qwen4exp")):
        (tmp_path / "f.gguf").write_bytes(content)
        touch(tmp_path / "f.gguf")
        assert describe(tmp_path / "f.gguf").architecture == architecture
    assert describe(tmp_path / "f.gguf").sequence is not None


@FAST
@given(data=st.data())
def test_truncated(tmp_path: Path, valid: bytes, data: st.DataObject) -> None:
    path = tmp_path / "f.gguf"
    data_end = len(valid.rstrip(b"\0"))  # the last file bytes are padding, which may be absent
    path.write_bytes(valid[: data.draw(st.integers(0, data_end - 1))])
    with pytest.raises(ImpError):
        Gguf.open(path)


@FAST
@given(data=st.data())
def test_bytes_replaced(tmp_path: Path, valid: bytes, data: st.DataObject) -> None:
    path = tmp_path / "f.gguf"
    content = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 8))
        content[at : at + 8] = data.draw(
            st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(EDGES))
        )
    path.write_bytes(content)
    touch(path)


@FAST
@given(data=st.data())
def test_numbers_of_a_known_architecture_replaced(
    tmp_path: Path, only_keys: bytes, data: st.DataObject
) -> None:
    path = tmp_path / "f.gguf"
    content = bytearray(only_keys)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(24, len(content) - 4))
        content[at : at + 4] = data.draw(
            st.one_of(st.binary(min_size=4, max_size=4), st.sampled_from([e[:4] for e in EDGES]))
        )
    path.write_bytes(content)
    touch(path)


EDGES = [
    value.to_bytes(8, "little")
    for value in (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
]
