"""Warnings that show the line of the caller's own code, however deep in libraries the call is."""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

# Those that may call ours in the caller's place.
_LIBRARIES = frozenset({"ringjax", "flax", "jax", "jaxtyping"})


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns with the nearest line that is of no library that carries calls."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _package(frame.f_globals) in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


_ONCE: list[Any] = []


def once(function: F) -> F:
    """Makes a function that may warn run once for each set of arguments."""
    cached = functools.lru_cache(maxsize=256)(function)
    _ONCE.append(cached)
    return cached  # pyright: ignore[reportReturnType]


def forget() -> None:
    """Lets what was warned of once be warned of again."""
    for cached in _ONCE:
        cached.cache_clear()


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__")).partition(".")[0]
