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


def is_real(number: Any) -> bool:
    """Returns whether a number is real, of Python or NumPy; a truth value is none."""
    return isinstance(number, numbers.Real) and not isinstance(number, bool)


def is_flag(flag: Any) -> bool:
    """Returns whether something is a truth value, of Python or NumPy."""
    return isinstance(flag, bool | np.bool_)


def check_flags(**flags: Any) -> None:
    """Checks what is true or false: most other values would count as true.

    Raises:
      TypeError: naming the argument and its value.
    """
    for name, flag in flags.items():
        if not is_flag(flag):
            raise TypeError(f"{name}={flag!r} must be True or False")


def check_optional_flags(**flags: Any) -> None:
    """Checks what is true or false, or None where it is not said.

    Raises:
      TypeError: naming the argument and its value.
    """
    for name, flag in flags.items():
        if not (flag is None or is_flag(flag)):
            raise TypeError(f"{name}={flag!r} must be True, False or None")
