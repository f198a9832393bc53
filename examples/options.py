"""What command lines of several programs share: numbers, branches, and errors in the words of options."""

import argparse
import re
from collections.abc import Mapping

from ringjax import Segments, Window

KINDS = {"segments": Segments, "window": Window}


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows the defaults that there are, where the help says no word of them."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        is_said = action.help is None or "by default" in action.help
        if is_said or any(default is nothing for nothing in (None, False, argparse.SUPPRESS)):
            return action.help
        text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        return f"{action.help} (default: {text})"


def positive(text: str) -> int:
    """Parses a positive number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


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
