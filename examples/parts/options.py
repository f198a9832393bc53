"""What command lines of several programs share: numbers, branches, and errors in the words of options."""

import argparse
import contextlib
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from ringjax import Segments, Window

KINDS = {"segments": Segments, "window": Window}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in two lines, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists the options\n")


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows the defaults that there are, where the help says no word of them."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        is_said = action.help is None or "by default" in action.help
        if is_said or any(default is nothing for nothing in (None, False, argparse.SUPPRESS)):
            return action.help
        text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        return f"{action.help} (default: {text})"


UNITS = {"k": 2**10, "m": 2**20}


def positive(text: str) -> int:
    """Parses a positive number, such as 4096, 4k or 1M."""
    unit = UNITS.get(text[-1:].lower(), 1)
    number = text[:-1] if unit > 1 else text
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(number) * unit


def positive_number(text: str) -> float:
    """Parses a positive, finite number, whole or not."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return number


def check_writable(option: str, path: Path, suffix: str = "") -> None:
    """Checks that a file can be written, or a folder where no suffix is asked for, and leaves all as it was.

    Raises:
      ValueError: naming the option, the path and the remedy.
    """
    if suffix and path.suffix != suffix:
        raise ValueError(f"{option} {path} must end in {suffix}")
    missing: list[Path] = []
    try:
        if suffix:
            existed = os.path.lexists(path)
            with path.open("ab"):
                pass
            if not existed:
                path.unlink()
        else:
            missing = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
    except OSError as error:
        kind = "file" if suffix else "folder"
        raise ValueError(f"{option} {path} cannot be written ({error.strerror}): name another {kind}") from None
    finally:
        with contextlib.suppress(OSError):  # where another run has begun there
            for folder in missing:
                folder.rmdir()


def seed(text: str) -> int:
    """Parses a number that random draws begin with."""
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to 2^31 - 1")
    return int(text)


def branch(text: str) -> Segments | Window:
    """Parses a branch, such as segments:16:2 or window:9."""
    kind, *numbers = text.split(":")
    if kind not in KINDS or len(numbers) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r} is no branch: write segments:LENGTH[:RATE] or window:SIZE[:RATE]")
    try:
        return KINDS[kind](*map(positive, numbers))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def in_options(error: Exception, names: Mapping[str, str]) -> str:
    """Returns what an error says with options in place of the arguments of functions: --heads 7 for num_heads=7."""
    return re.sub(rf"\b({'|'.join(names)})=", lambda found: f"{names[found[1]]} ", str(error))
