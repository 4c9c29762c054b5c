"""Sessions for the rows of a table: one for all of them, or one each if memory is short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from imp_runtime.errors import ImpError
from imp_runtime.session import Session


@dataclass(frozen=True)
class Need:
    """What a row asks of a session."""

    n_ctx: int
    """Tokens of its longest sequence."""
    max_seqs: int
    """Sequences open at the same time."""


class Sessions:
    """Gives a session that is large enough. Closes all when left."""

    def __init__(self, open_session: Callable[[Need], Session], needs: Sequence[Need]):
        """Try one session for all needs.

        Args:
            open_session: raises ImpError if the need cannot be met.
            needs: of all rows.
        """
        self._open = open_session
        self._session: Session | None = None
        self._holds: Need | None = None
        if needs:
            largest = Need(max(n.n_ctx for n in needs), max(n.max_seqs for n in needs))
            try:
                self._replace(largest)
            except (ImpError, MemoryError):
                pass  # rows are tried one by one and give their own reason

    def get(self, need: Need) -> Session:
        """A session for one row, valid until the next call.

        Raises:
            ImpError: the row does not fit.
        """
        held = self._holds
        if self._session is None or held is None or not _covers(held, need):
            self._replace(need)
        assert self._session is not None
        return self._session

    def _replace(self, need: Need) -> None:
        self.close()
        self._session = self._open(need)
        self._holds = need

    def close(self) -> None:
        """Free the session."""
        if self._session is not None:
            self._session.close()
        self._session = self._holds = None

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _covers(held: Need, need: Need) -> bool:
    return need.n_ctx <= held.n_ctx and need.max_seqs <= held.max_seqs
