"""The promotion of dtypes and ranks that the library's own arithmetic counts on."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def own_promotion() -> Iterator[None]:
    """Has jax's default promotion inside, whatever the caller's settings forbid; also a decorator."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
