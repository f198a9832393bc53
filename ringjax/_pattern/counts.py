"""Checks of counts, numbers and flags, with uniform error messages."""

import numbers
from typing import Any

import numpy as np
from jax.core import Tracer


def is_integer(number: Any) -> bool:
    """Returns whether a value is a Python or NumPy integer; a bool is not."""
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)


def check_count(name: str, number: Any) -> None:
    """Checks a required count.

    Raises:
      ValueError: naming the argument and its value.
    """
    if not is_integer(number) or number < 1:
        raise ValueError(f"{name}={number!r} must be a positive integer")


def check_optional_count(name: str, number: Any) -> None:
    """Checks a count, or None for the default.

    Raises:
      ValueError: naming the argument, its value and the remedy.
    """
    if number is not None and (not is_integer(number) or number < 1):
        raise ValueError(f"{name}={number!r} must be a positive integer: leave it out for the default")


def is_real(number: Any) -> bool:
    """Returns whether a value is a real Python or NumPy number; a bool is not."""
    return isinstance(number, numbers.Real) and not isinstance(number, bool)


def is_flag(flag: Any) -> bool:
    """Returns whether a value is a Python or NumPy bool."""
    return isinstance(flag, bool | np.bool_)


def check_flag(name: str, flag: Any) -> None:
    """Checks that a flag is a bool, because most other values would count as true.

    Raises:
      TypeError: naming the argument and its value.
    """
    if not is_flag(flag):
        raise TypeError(f"{name}={flag!r} must be True or False")


def check_flags(**flags: Any) -> None:
    """Checks several flags, given by name; see `check_flag`."""
    for name, flag in flags.items():
        check_flag(name, flag)


def read_flag(name: str, flag: Any) -> Any:
    """Returns a flag as True or False, even if it is a scalar boolean array, or None if it is not given.

    Raises:
      TypeError: naming the argument, its value and the remedy.
    """
    if isinstance(flag, Tracer):
        raise TypeError(f"{name} is traced, but must be known before: make it a static argument of what traces it")
    if np.shape(flag) == () and getattr(flag, "dtype", None) == np.bool_:
        return bool(flag)
    check_optional_flag(name, flag)
    return flag


def check_optional_flag(name: str, flag: Any) -> None:
    """Checks that a flag is a bool, or None if it is not given.

    Raises:
      TypeError: naming the argument and its value.
    """
    if not (flag is None or is_flag(flag)):
        raise TypeError(f"{name}={flag!r} must be True, False or None")
