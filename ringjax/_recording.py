"""Records the calls of attention that a function makes while it is traced, for those who explain them."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from ringjax._forecast.call import Call
from ringjax._mesh.placement import Placement


class Record(NamedTuple):
    """A call, the strategy that was asked for, where its arrays lie, and where its mesh is from."""

    call: Call
    strategy: str
    placement: Placement
    source: str


class _Recording(NamedTuple):
    records: list[Record]
    is_for_another_device: bool


_RECORDING: contextvars.ContextVar[_Recording | None] = contextvars.ContextVar("recording", default=None)


@contextlib.contextmanager
def recording(is_for_another_device: bool = False) -> Iterator[list[Record]]:
    """Gives the list of what is recorded inside."""
    own = _Recording([], is_for_another_device)
    token = _RECORDING.set(own)
    try:
        yield own.records
    finally:
        _RECORDING.reset(token)


def record(one: Record) -> Call:
    """Records a call, if anybody wants to know, and returns what is to be traced.

    For another device that is a call without its implementation, which this device need not serve.
    """
    own = _RECORDING.get()
    if own is not None:
        own.records.append(one)
    return dataclasses.replace(one.call, implementation=None) if own and own.is_for_another_device else one.call
