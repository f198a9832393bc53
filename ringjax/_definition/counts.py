"""Numbers of things: what they must be, said in one way."""

import numbers
from typing import Any


def is_integer(number: Any) -> bool:
    """Returns whether a number is an integer, of Python or NumPy; a truth value is none."""
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)


def check_count(name: str, number: Any) -> None:
    """Checks how many there are of something that there must be.

    Raises:
      ValueError: naming the argument and its value.
    """
    if not is_integer(number) or number < 1:
        raise ValueError(f"{name}={number!r} must be a positive integer")
