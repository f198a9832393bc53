"""What the tests check annotations with."""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def check(function: Any) -> Callable[..., Any]:
    """Checks the calls of a function; those inside others have no shapes, and their checks would be built each time."""
    return function if "<locals>" in function.__qualname__ else beartype(function)
