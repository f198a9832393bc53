"""Records the calls of attention that a function makes while it is traced, for those who explain them."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

from ringjax._call import Call
from ringjax._mesh.placement import Placement


class Record(NamedTuple):
    """A call, the strategy that was asked for, where its arrays lie, and where its mesh is from."""

    call: Call
    strategy: Any
    placement: Placement
    source: str


_RECORDS: contextvars.ContextVar[list[Record] | None] = contextvars.ContextVar("records", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Record]]:
    """Gives the list of what is recorded inside."""
    records: list[Record] = []
    token = _RECORDS.set(records)
    try:
        yield records
    finally:
        _RECORDS.reset(token)


def record(one: Record) -> None:
    """Records a call, if anybody wants to know."""
    records = _RECORDS.get()
    if records is not None:
        records.append(one)
