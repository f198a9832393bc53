"""Draws a pattern: how often each pair counts, in each branch and in all, and how many keys a query sees.

`python examples/draw_pattern.py docs/pattern.svg` draws the picture of the README;
`python examples/draw_pattern.py mine.png window:9 segments:64:4 --tokens 64 --causal` another.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
from parts.options import Formatter, Parser, branch, check_writable, in_options, positive

from ringjax import DilatedPattern, Segments

LONGNET = [Segments(8), Segments(16, 2), Segments(32, 4)]
PICTURES = (".png", ".svg", ".pdf")
MOST_TOKENS = 4096
OPTIONS = {"num_kv_heads": "--kv-heads", "head": "--head"}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = Parser(description=__doc__, formatter_class=Formatter)
    add = parser.add_argument
    add("path", type=Path, metavar="FILE", help="the picture to write, such as pattern.svg")
    usage = "segments:LENGTH[:RATE] or window:SIZE[:RATE]; LongNet's by default"
    add("branches", nargs="*", type=branch, default=LONGNET, metavar="BRANCH", help=usage)
    add("--tokens", type=positive, default=32, help="length of the sequence")
    add("--kv-heads", type=positive, default=4, help="number of key/value heads")
    add("--head", type=int, default=1, help="the head to draw")
    add("--devices", type=positive, default=4, help="devices whose boundaries and hops are shown")
    add("--causal", action=argparse.BooleanOptionalAction, default=True, help="draw no later keys")
    return parser.parse_args(argv)


def draw(arguments: argparse.Namespace) -> None:
    """Writes the picture."""
    mpl.rcParams["svg.hashsalt"] = "ringjax"  # the same picture gives the same file
    figure = DilatedPattern(arguments.branches).plot(
        arguments.tokens, arguments.kv_heads, arguments.head, arguments.causal, num_devices=arguments.devices
    )
    figure.savefig(arguments.path, metadata={"Date": None} if arguments.path.suffix == ".svg" else None)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; wrong input ends it with exit code 2."""
    arguments = parse_arguments(argv)
    try:
        if arguments.path.suffix not in PICTURES:
            raise ValueError(f"FILE {arguments.path} must end in one of {', '.join(PICTURES)}")
        check_writable("FILE", arguments.path, arguments.path.suffix)
        if arguments.tokens > MOST_TOKENS:
            raise ValueError(f"--tokens {arguments.tokens} is above {MOST_TOKENS}: a picture has no room for more")
        draw(arguments)
    except (ValueError, OSError) as error:
        print(f"draw_pattern.py: error: {in_options(error, OPTIONS)}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
