"""What the tests check annotations with."""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def check(function: Any) -> Callable[..., Any]:
    """Checks the calls of a function; one inside another would be built anew with each call, and has no shapes."""
    return function if "<locals>" in function.__qualname__ else beartype(function)
