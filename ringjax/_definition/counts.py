"""Numbers of things, and truth values: what they must be, said in one way."""

import numbers
from typing import Any

import numpy as np


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


def check_causal(is_causal: Any) -> None:
    """Checks whether queries see later keys.

    Raises:
      TypeError: if that is neither true nor false.
    """
    if not isinstance(is_causal, bool | np.bool_):
        raise TypeError(f"is_causal={is_causal!r} must be True or False")
