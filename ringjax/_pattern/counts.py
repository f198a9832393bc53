"""Numbers of things, and truth values: what they must be, said in one way."""

import numbers
from typing import Any

import numpy as np
from jax.core import Tracer


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


def check_optional_count(name: str, number: Any) -> None:
    """Checks how many there are of something, or None where nothing is said.

    Raises:
      ValueError: naming the argument, its value and the remedy.
    """
    if number is not None and (not is_integer(number) or number < 1):
        raise ValueError(f"{name}={number!r} must be a positive integer: leave it out for the default")


def is_real(number: Any) -> bool:
    """Returns whether a number is real, of Python or NumPy; a truth value is none."""
    return isinstance(number, numbers.Real) and not isinstance(number, bool)


def is_flag(flag: Any) -> bool:
    """Returns whether something is a truth value, of Python or NumPy."""
    return isinstance(flag, bool | np.bool_)


def check_flag(name: str, flag: Any) -> None:
    """Checks what is true or false: most other values would count as true.

    Raises:
      TypeError: naming the argument and its value.
    """
    if not is_flag(flag):
        raise TypeError(f"{name}={flag!r} must be True or False")


def check_flags(**flags: Any) -> None:
    """Checks several by their names, see `check_flag`."""
    for name, flag in flags.items():
        check_flag(name, flag)


def read_flag(name: str, flag: Any) -> Any:
    """Returns what a call is told, as True or False, also where an array says it; None where nothing is said.

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
    """Checks what is true or false, or None where it is not said.

    Raises:
      TypeError: naming the argument and its value.
    """
    if not (flag is None or is_flag(flag)):
        raise TypeError(f"{name}={flag!r} must be True, False or None")
