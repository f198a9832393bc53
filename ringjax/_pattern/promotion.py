"""The promotion of dtypes and ranks that the library's own arithmetic relies on."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def own_promotion() -> Iterator[None]:
    """Enables jax's default promotion inside, even if the caller's settings forbid it; also works as a decorator."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
