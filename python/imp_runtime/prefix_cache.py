"""States of sequences at chosen lengths, so that a prompt is read only from where it is new.

An entry is a fork: it retains its cache pages and owns a copy of the rest of the state, so a hit
restores everything. Entries are found by a chain of hashes, one link per page of tokens.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from imp_runtime.errors import ImpError
from imp_runtime.session import Session
from imp_runtime.snapshot import Snapshot

SUFFIX = ".imps"
DISK_FACTOR = 8
"""Bytes of the folder at most, in units of the budget in memory."""


def boundaries(prompt: int, page: int, stride: int, wanted: Sequence[int] = ()) -> list[int]:
    """Lengths of a prompt of `prompt` tokens whose state is worth keeping, ascending.

    Every `stride` tokens (rounded up to pages), the last page border before the last token, the
    end, and those `wanted`.
    """
    step = max(1, -(-stride // page)) * page
    lengths = {*range(step, prompt, step), (prompt - 1) // page * page, prompt}
    return sorted(n for n in lengths.union(wanted) if 0 < n <= prompt)


@dataclass(frozen=True)
class Hit:
    """seq: a new sequence of the session, with the first `length` tokens of the prompt."""

    seq: int
    length: int


class PrefixCache:
    """Kept states in a session, least recently used ones go first. One thread at a time."""

    def __init__(
        self,
        session: Session,
        max_bytes: int,
        *,
        stride: int = 256,
        folder: Path | None = None,
    ) -> None:
        """Start empty, or with what `folder` holds.

        Args:
            session: the entries are sequences of it, beside those of running requests.
            max_bytes: of pages and states that entries hold, in memory.
            stride: tokens between two kept states of a long prompt.
            folder: what leaves the memory goes there and is found again, even by a later process;
                it takes DISK_FACTOR times max_bytes at most.

        Raises:
            ImpError: the folder cannot be made.
        """
        self._core = session.core
        self.max_bytes, self.stride, self._folder = max_bytes, stride, folder
        self._page = session.core.page_tokens
        self._page_bytes, self._row_bytes = session.core.page_bytes, session.core.row_bytes
        self._entries: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # key: seq, length
        self._lengths: Counter[int] = Counter()
        self._pages: Counter[int] = Counter()
        self.hits = self.misses = self.hit_tokens = 0
        self.refusals: list[str] = []
        """One sentence for each file of the folder that was damaged or of something else."""
        self.foreign = 0
        """Files in the folder that are of other models or cache types."""
        self._on_disk: dict[bytes, int] = {}  # key: length
        if folder is not None:
            self._prefix = f"{session.core.model_hash:016x}-{'-'.join(session.core.cache_types)}-"
            self._scan(folder)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def seqs(self) -> list[int]:
        """Sequences that entries hold."""
        return [seq for seq, _ in self._entries.values()]

    @property
    def held_bytes(self) -> int:
        """Bytes that entries hold; a page that several share counts once."""
        return len(self._entries) * self._row_bytes + len(self._pages) * self._page_bytes

    def touch(self, tokens: Sequence[int]) -> int:
        """Length of the longest entry that begins `tokens` and leaves one; it counts as used."""
        length, key = max(self._known(tokens), default=(0, b""))
        if key in self._entries:
            self._entries.move_to_end(key)
        return length

    def take(self, tokens: Sequence[int]) -> Hit | None:
        """A sequence with the longest kept beginning of `tokens`; None = there is none.

        Raises:
            ImpError: the session has no sequence left.
        """
        for length, key in sorted(self._known(tokens), reverse=True):
            if key in self._entries:
                self._entries.move_to_end(key)
                seq = self._core.fork(self._entries[key][0])
            elif (restored := self._read(key, list(tokens[:length]))) is not None:
                seq = restored
            else:
                continue
            self.hits += 1
            self.hit_tokens += length
            return Hit(seq, length)
        self.misses += 1
        return None

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether exactly these tokens are kept in memory; if so they count as used."""
        key = self._key(tokens)
        if key in self._entries:
            self._entries.move_to_end(key)
        return key in self._entries

    def put(self, seq: int, tokens: Sequence[int]) -> None:
        """Keep `seq`, which has read `tokens`; the cache closes it when it goes."""
        if not tokens or self.has(tokens):
            self._core.close_sequence(seq)
            return
        self._entries[self._key(tokens)] = (seq, len(tokens))
        self._lengths[len(tokens)] += 1
        self._pages.update(self._core.sequence_pages(seq))
        while self.held_bytes > self.max_bytes and self.evict():
            pass

    def evict(self) -> bool:
        """Drop the least recently used entry. False if there is none."""
        if not self._entries:
            return False
        key, (seq, length) = self._entries.popitem(last=False)
        self._lengths -= Counter([length])
        self._pages.subtract(self._core.sequence_pages(seq))
        self._pages = +self._pages
        self._write(key, seq, length)
        self._core.close_sequence(seq)
        return True

    def clear(self) -> None:
        """Drop all entries; with a folder they are found there again."""
        while self.evict():
            pass

    def _known(self, tokens: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        lengths = {*self._lengths, *self._on_disk.values()}
        for length, key in self._chain(tokens, sorted(n for n in lengths if n < len(tokens))):
            if key in self._entries or key in self._on_disk:
                yield length, key

    def _key(self, tokens: Sequence[int]) -> bytes:
        return next(self._chain(tokens, [len(tokens)]))[1]

    def _chain(self, tokens: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """(length, key) of the beginnings of `tokens` that have these lengths, ascending."""
        link, ids = b"", array("i", tokens)
        for page in range(0, (lengths[-1] if lengths else 0) + 1, self._page):
            end = page + self._page
            for n in lengths[bisect_right(lengths, page - 1) : bisect_right(lengths, end - 1)]:
                yield n, hashlib.blake2b(link + ids[page:n].tobytes(), digest_size=20).digest()
            link = hashlib.blake2b(link + ids[page:end].tobytes(), digest_size=32).digest()

    # ------------------------------------------------------------------ on disk

    def _path(self, key: bytes, length: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._prefix}{length}-{key.hex()}{SUFFIX}"

    def _scan(self, folder: Path) -> None:
        """Learn the files of this model and cache by their names; checked when they are used."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            names = sorted(p.name for p in folder.glob(f"*{SUFFIX}"))
        except OSError as error:
            raise ImpError(f"{folder}: {error.strerror}") from error
        mine = [name for name in names if name.startswith(self._prefix)]
        self.foreign = len(names) - len(mine)
        for name in mine:
            length, _, key = name[len(self._prefix) : -len(SUFFIX)].partition("-")
            try:
                self._on_disk[bytes.fromhex(key)] = int(length)
            except ValueError:
                continue  # not a name that _path() gives

    def _read(self, key: bytes, tokens: list[int]) -> int | None:
        """The sequence of a file; one that is damaged or holds something else is removed."""
        path = self._path(key, len(tokens))
        try:
            snapshot = Snapshot.read(path)
            if snapshot.tokens != tokens:
                raise ImpError(f"{path}: a snapshot of other tokens")
            seq = self._core.restore(snapshot.data, snapshot.name)
            with suppress(OSError):
                os.utime(path)  # the least recently used file goes first
            return seq
        except ImpError as error:
            if error.code != "out_of_memory":
                self.refusals.append(str(error))
                self._on_disk.pop(key, None)
                path.unlink(missing_ok=True)
            return None

    def _write(self, key: bytes, seq: int, length: int) -> None:
        if self._folder is None or key in self._on_disk:
            return
        try:
            Snapshot(self._core.save(seq)).write(self._path(key, length))
            self._on_disk[key] = length
            self._shrink()
        except (ImpError, OSError):
            return  # the state is only lost

    def _shrink(self) -> None:
        """Remove the least recently used files until the folder is within its bytes."""
        assert self._folder is not None
        found = [(p, p.stat()) for p in self._folder.glob(f"{self._prefix}*{SUFFIX}")]
        total = sum(s.st_size for _, s in found)
        for path, stat in sorted(found, key=lambda f: f[1].st_mtime_ns):
            if total <= DISK_FACTOR * self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= stat.st_size
            key = path.name[: -len(SUFFIX)].rpartition("-")[2]
            self._on_disk.pop(bytes.fromhex(key), None)
