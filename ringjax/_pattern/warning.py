"""Warnings that show the line of the caller's own code, however deep in libraries the call is."""

import contextlib
import contextvars
import sys
import warnings
from collections.abc import Hashable, Iterator

# The libraries that may call ringjax for the caller.
_LIBRARIES = frozenset({"contextlib", "ringjax", "flax", "jax", "jaxtyping"})


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns, and shows the nearest line on the call stack outside of these libraries."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _package(frame.f_globals) in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


_GIVEN: contextvars.ContextVar[set[Hashable]] = contextvars.ContextVar("given", default=set())  # noqa: B039


def warn_once(about: Hashable, message: str, category: type[Warning] = UserWarning) -> None:
    """Warns unless it has warned about this before."""
    given = _GIVEN.get()
    if (about, category) not in given:
        warn(message, category)
        given.add((about, category))  # not reached if the warning is an error: it is raised each time


@contextlib.contextmanager
def warning_anew() -> Iterator[None]:
    """Lets `warn_once` warn again inside, and restores what it has warned about afterwards."""
    token = _GIVEN.set(set())
    try:
        yield
    finally:
        _GIVEN.reset(token)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__")).partition(".")[0]
