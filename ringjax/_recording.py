"""Records the attention calls that a function makes while it is traced, for tools that explain or measure them."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

from ringjax._call import Call
from ringjax._mesh.placement import Placement


class Record(NamedTuple):
    """A call, the requested strategy, the placement of its arrays, and where its mesh is from."""

    call: Call
    strategy: Any
    placement: Placement
    source: str


_RECORDS: contextvars.ContextVar[list[Record] | None] = contextvars.ContextVar("records", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Record]]:
    """Yields the list to which calls inside the context are recorded."""
    records: list[Record] = []
    token = _RECORDS.set(records)
    try:
        yield records
    finally:
        _RECORDS.reset(token)


def record(one: Record) -> None:
    """Records a call inside `recording`, and does nothing elsewhere."""
    records = _RECORDS.get()
    if records is not None:
        records.append(one)
