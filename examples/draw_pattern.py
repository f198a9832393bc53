"""Draws a pattern: how often each pair counts, in each branch and in all, and how many keys a query sees.

`python examples/draw_pattern.py docs/pattern.svg` draws the picture of the README;
`python examples/draw_pattern.py mine.png window:9 segments:64:4 --tokens 64 --causal` another.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
from ringjax import DilatedPattern, Segments, Window

KINDS = {"segments": Segments, "window": Window}
LONGNET = ["segments:8", "segments:16:2", "segments:32:4"]


def branch_of(text: str) -> Segments | Window:
    """Returns the branch in a text such as segments:16:2 or window:9."""
    kind, *numbers = text.split(":")
    return KINDS[kind](*map(int, numbers))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("path", type=Path, metavar="FILE", help="the picture to write, such as pattern.svg")
    add("branches", nargs="*", default=LONGNET, metavar="BRANCH", help="segments:LENGTH[:RATE] or window:SIZE[:RATE]")
    add("--tokens", type=int, default=32, help="length of the sequence")
    add("--kv-heads", type=int, default=4, help="number of key/value heads")
    add("--head", type=int, default=1, help="the head to draw")
    add("--devices", type=int, default=4, help="devices whose boundaries and hops are shown")
    add("--causal", action=argparse.BooleanOptionalAction, default=True, help="draw no later keys")
    return parser.parse_args(argv)


def main(arguments: argparse.Namespace) -> None:
    """Writes the picture."""
    mpl.rcParams["svg.hashsalt"] = "ringjax"  # the same picture gives the same file
    pattern = DilatedPattern([branch_of(text) for text in arguments.branches])
    figure = pattern.plot(
        arguments.tokens, arguments.kv_heads, arguments.head, arguments.causal, num_devices=arguments.devices
    )
    figure.savefig(arguments.path, metadata={"Date": None} if arguments.path.suffix == ".svg" else None)


if __name__ == "__main__":
    main(parse_arguments())
