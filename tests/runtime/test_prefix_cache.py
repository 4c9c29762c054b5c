"""A prompt that begins like an earlier one gets the same tokens as if nothing had been kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from imp_runtime.errors import ImpError
from imp_runtime.model import Model
from imp_runtime.prefix_cache import DISK_FACTOR, SUFFIX, PrefixCache, boundaries
from imp_runtime.sampling import SamplingParams
from imp_runtime.session import Session
from tests.models.golden import MODELS, Golden
from tests.runtime.traffic import Ask, alone, engine_of, nothing_held, run, submit

Load = Callable[[str], Model]
PARAMS = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=5, max_tokens=4, ignore_eos=True)


def open_session(model: Model, rows: int = 10, tokens: int = 960, **types: str) -> Session:
    options = {"n_ctx": 96, "n_threads": 1, "n_ubatch": 64, "poison": True}
    return Session(model, max_seqs=rows, cache_tokens=tokens, **options, **types)  # type: ignore[arg-type]


@pytest.fixture
def session(model: Load) -> Iterator[Session]:
    with open_session(model("base")) as opened:
        yield opened


def cache_of(session: Session, **options: object) -> PrefixCache:
    return PrefixCache(session, 1 << 30, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_a_hit_equals_a_cold_start(name: str, model: Load) -> None:
    """At every length around pages and index blocks, with any rest."""
    tokens = Golden(name).tokens("long")
    prompts = [tokens[:at] + tokens[100:][: 1 + at % 19] for at in range(1, 41)]
    want = alone(model(name), [Ask(p, PARAMS) for p in prompts])
    with open_session(model(name)) as session:
        for keep, prompt, expected in zip(range(1, 41), prompts, want, strict=True):
            cache = cache_of(session)
            engine = engine_of(session, cache=cache, n=2)
            run(engine, [Ask(tokens[:keep] + [7] * 9, PARAMS)], keep=[keep])
            ask = Ask(prompt, PARAMS)
            request = submit(engine, ask)
            engine.wait(lambda ask=ask: ask.ended)  # type: ignore[misc]
            assert request.timings.cached_tokens == keep
            assert request.timings.prompt_tokens == len(prompt) - keep
            assert ask.tokens == expected, keep
            engine.close()
            assert nothing_held(session)


@pytest.mark.parametrize("types", [("f16", "q8_0"), ("q8_0", "bf16")])
def test_a_hit_in_a_rounded_cache(types: tuple[str, str], model: Load, tmp_path: Path) -> None:
    """In memory and from the folder, which sessions of other types do not read."""
    options = {"cache_type_k": types[0], "cache_type_v": types[1]}
    tokens = Golden("base").tokens("long")
    prompts = {at: tokens[:at] + tokens[100:][: 1 + at % 19] for at in (1, 15, 16, 17, 33)}
    want = alone(model("base"), [Ask(p, PARAMS) for p in prompts.values()], **options)
    for keep, expected in zip(prompts, want, strict=True):
        for _ in range(2):  # kept in the first round, found in the folder in the second
            with open_session(model("base"), **options) as session:
                cache = cache_of(session, folder=tmp_path / str(keep))
                engine = engine_of(session, cache=cache, n=2)
                if not cache.touch(prompts[keep]):
                    run(engine, [Ask(tokens[:keep] + [7] * 9, PARAMS)], keep=[keep])
                ask = Ask(prompts[keep], PARAMS)
                request = submit(engine, ask)
                engine.wait(lambda ask=ask: ask.ended)  # type: ignore[misc]
                assert request.timings.cached_tokens >= keep  # its own borders were kept too
                assert ask.tokens == expected, keep
                engine.close()
    with open_session(model("base")) as session:
        assert not cache_of(session, folder=tmp_path / "33").touch(prompts[33])


def test_the_same_prompt_again(session: Session, model: Load) -> None:
    tokens = Golden("base").tokens("long")
    cache = cache_of(session)
    engine = engine_of(session, cache=cache, n=2)
    for size, hit in ((1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (60, 48)):
        prompt = [size, *tokens[: size - 1]]
        (want,) = alone(model("base"), [Ask(prompt, PARAMS)])
        for turn in range(3):
            ask = Ask(prompt, PARAMS)
            request = submit(engine, ask)
            engine.wait(lambda ask=ask: ask.ended)  # type: ignore[misc]
            assert ask.tokens == want
            assert request.timings.cached_tokens == (hit if turn else 0)
    engine.close()
    assert nothing_held(session)


def test_the_next_turn(session: Session, model: Load) -> None:
    """What was answered is kept too, up to its last token."""
    cache = cache_of(session)
    engine = engine_of(session, cache=cache, n=2)
    conversation = Golden("base").tokens("long")[:21]
    for turn in range(4):
        ask = Ask(list(conversation), PARAMS)
        request = submit(engine, ask)
        engine.wait(lambda ask=ask: ask.ended)  # type: ignore[misc]
        assert [ask.tokens] == alone(model("base"), [ask.again()])
        assert request.timings.cached_tokens == (len(conversation) - 6 if turn else 0)
        conversation += [*ask.tokens, 9, 8, 7, 6, 5]
    assert cache.hits == 3


def test_off_for_a_request(session: Session) -> None:
    cache = cache_of(session)
    engine = engine_of(session, cache=cache, n=2)
    prompt = [1] * 40
    run(engine, [Ask(prompt, PARAMS)], use_cache=False)
    assert len(cache) == 0
    run(engine, [Ask(prompt, PARAMS)])
    assert len(cache) > 0
    cold = submit(engine, ask := Ask(prompt, PARAMS), use_cache=False)
    engine.wait(lambda: ask.ended)
    assert cold.timings.cached_tokens == 0
    assert (cache.hits, cache.misses) == (0, 1)


def test_budget(session: Session) -> None:
    """Least recently used states go first; shared pages count once."""
    row, page = session.core.row_bytes, session.core.page_bytes
    cache = PrefixCache(session, 3 * row + 4 * page)

    def put(tokens: list[int]) -> None:
        seq = session.open()
        seq.extend(tokens)
        cache.put(seq.id, tokens)

    base = list(range(32))
    put(base[:16])
    with session.open() as seq:
        seq.extend(base)
        cache.put(session.core.fork(seq.id), base)
        cache.put(session.core.fork(seq.id), base)  # twice is once
    assert (len(cache), cache.held_bytes) == (2, 2 * row + 3 * page)
    assert cache.touch([*base[:16], 99]) == 16
    put([50] * 16)
    assert (len(cache), cache.held_bytes) == (3, 3 * row + 4 * page)  # exactly
    put([51] * 17)
    assert not cache.has(base) and cache.has(base[:16])
    assert cache.touch([*base, 1]) == 16
    assert cache.held_bytes <= cache.max_bytes
    cache.clear()
    assert (len(cache), cache.held_bytes) == (0, 0)
    assert nothing_held(session)


def test_running_requests_come_first(model: Load) -> None:
    """Kept states make room, and what is read at the moment is not lost."""
    tokens = Golden("base").tokens("long")
    prompts = [tokens[i : i + 50] for i in (0, 30, 60, 90, 0, 30)]
    want = alone(model("base"), [Ask(p, PARAMS) for p in prompts])
    with open_session(model("base"), rows=4, tokens=96) as session:
        cache = cache_of(session, stride=16)
        engine = engine_of(session, cache=cache, n=2)
        for prompt, expected in zip(prompts, want, strict=True):
            assert run(engine, [Ask(prompt, PARAMS)]) == [expected]
        assert run(engine, [Ask(p, PARAMS) for p in prompts]) == want
        engine.close()
        assert nothing_held(session)


def test_what_is_needed_now_is_not_dropped(model: Load) -> None:
    """The least recently used state is the one that the next prompt begins with."""
    with open_session(model("base"), rows=4) as session:  # three states beside one request
        cache = cache_of(session)
        engine = engine_of(session, cache=cache, n=1)
        run(engine, [Ask([1] * 16, PARAMS)])
        kept = [[1] * 16, *([t] * 16 for t in (2, 3, 4))]
        cache.clear()
        for tokens in kept:
            seq = session.open()
            seq.extend(tokens)
            cache.put(seq.id, tokens)
        assert session.core.free_rows == 0
        request = submit(engine, ask := Ask([1] * 30, PARAMS))
        engine.wait(lambda: ask.ended)
        assert request.timings.cached_tokens == 16


def test_boundaries() -> None:
    assert boundaries(1, 16, 256) == [1]
    assert boundaries(16, 16, 256) == [16]
    assert boundaries(17, 16, 256) == [16, 17]
    assert boundaries(100, 16, 32, [50, 0, 100, 101]) == [32, 50, 64, 96, 100]
    assert boundaries(50, 16, 17) == [32, 48, 50]


# ---------------------------------------------------------------- on disk


def fill(model: Model, folder: Path, prompt: list[int]) -> list[int]:
    with open_session(model) as session:
        cache = cache_of(session, folder=folder)
        engine = engine_of(session, cache=cache, n=2)
        tokens = run(engine, [Ask(prompt, PARAMS)])[0]
        engine.close()
        assert nothing_held(session)
    return tokens


def restart(model: Model, folder: Path, prompt: list[int]) -> tuple[list[int], int, PrefixCache]:
    with open_session(model) as session:
        cache = cache_of(session, folder=folder)
        engine = engine_of(session, cache=cache, n=2)
        request = submit(engine, ask := Ask(prompt, PARAMS))
        engine.wait(lambda: ask.ended)
        engine.close()
        assert nothing_held(session)
    return ask.tokens, request.timings.cached_tokens, cache


def test_warm_restart(model: Load, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    prompt = Golden("base").tokens("long")[:60]
    want = fill(model("base"), folder, prompt)
    assert restart(model("base"), folder, prompt)[:2] == (want, 48)
    longer = prompt + want[:3] + [4, 4]
    (cold,) = alone(model("base"), [Ask(longer, PARAMS)])
    assert restart(model("base"), folder, longer)[:2] == (cold, 63)


def test_damaged_and_foreign_files_are_rebuilt(model: Load, tmp_path: Path) -> None:
    prompt = Golden("base").tokens("long")[:40]
    want = fill(model("base"), tmp_path, prompt)
    other = fill(model("options"), tmp_path, prompt)  # side by side
    assert restart(model("options"), tmp_path, prompt)[:2] == (other, 32)
    files = sorted(tmp_path.glob("*" + SUFFIX))
    (tmp_path / f"{files[0].name.rsplit('-', 2)[0]}-x-y{SUFFIX}").write_bytes(
        b"a name that is not one"
    )
    hit = {}
    for file in files:
        data = file.read_bytes()
        hit[file.name] = data
        file.write_bytes(data[:-1])
    tokens, cached, cache = restart(model("base"), tmp_path, prompt)
    assert (tokens, cached, len(cache.refusals)) == (want, 0, 1)
    assert restart(model("base"), tmp_path, prompt)[:2] == (want, 32)  # rebuilt
    mine = [f for f in files if "-32-" in f.name]
    for a, b in (mine, mine[::-1]):  # the state of another model under a good name
        a.write_bytes(hit[b.name])
    tokens, cached, cache = restart(model("base"), tmp_path, prompt)
    assert (tokens, cached, len(cache.refusals)) == (want, 0, 1)
    same = [f for f in files if f.name.startswith(mine[0].name[:17]) and f not in mine]
    same += [f for f in files if f.name.startswith(mine[1].name[:17]) and f not in mine]
    for file in mine:
        twin = next(f for f in same if f.name[:17] == file.name[:17])
        file.write_bytes(hit[twin.name])  # other tokens of the same model
    tokens, cached, cache = restart(model("base"), tmp_path, prompt)
    assert (tokens, cached, len(cache.refusals)) == (want, 0, 1)
    assert not list(tmp_path.glob("*.part"))


def test_the_folder_has_a_limit(model: Load, tmp_path: Path) -> None:
    with open_session(model("base")) as session:
        row, page = session.core.row_bytes, session.core.page_bytes
        cache = PrefixCache(session, row + 2 * page, folder=tmp_path)
        engine = engine_of(session, cache=cache, n=2)
        for i in range(20):
            run(engine, [Ask([i] * 20, PARAMS)])
        engine.close()
        sizes = [f.stat().st_size for f in tmp_path.iterdir()]
        assert sum(sizes) <= DISK_FACTOR * cache.max_bytes < sum(sizes) + max(sizes)


def test_files_that_are_used_stay(model: Load, tmp_path: Path) -> None:
    with open_session(model("base")) as session:
        row, page = session.core.row_bytes, session.core.page_bytes
        cache = PrefixCache(session, row + 2 * page, folder=tmp_path)
        engine = engine_of(session, cache=cache, n=2)
        run(engine, [Ask([1] * 20, PARAMS)])
        for i in range(2, 12):  # each writes more than a tenth of what the folder holds
            run(engine, [Ask([i] * 20, PARAMS)])
            request = submit(engine, ask := Ask([1] * 20, PARAMS))
            engine.wait(lambda ask=ask: ask.ended)  # type: ignore[misc]
            assert request.timings.cached_tokens == 16
        engine.close()


def test_a_folder_that_cannot_be(session: Session, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ImpError, match="file/x: Not a directory"):
        cache_of(session, folder=tmp_path / "file" / "x")
