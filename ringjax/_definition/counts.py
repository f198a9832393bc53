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


def check_flags(**flags: Any) -> None:
    """Checks what is true or false: most other values would count as true.

    Raises:
      TypeError: naming the argument and its value.
    """
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name}={flag!r} must be True or False")
