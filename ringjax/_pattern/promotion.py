"""The promotion of dtypes and ranks that the library's own arithmetic counts on."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_own_promotion(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns the function with jax's default promotion inside, whatever the caller's settings forbid."""

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return wrapped
