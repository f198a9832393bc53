"""The command line: `ringjax plan`."""

import argparse
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringjax._definition.branch import Branch, Segments, Window
from ringjax._definition.pattern import DilatedPattern
from ringjax._forecast.machine import MACHINES
from ringjax._planner.comparison import Comparison
from ringjax._planner.planner import FEATURES, plan

_PICTURES = ".png", ".svg", ".pdf"
_UNITS = {"k": 2**10, "m": 2**20}
# What the arguments of `plan` are called here.
_FLAGS = {"num_tokens": "--tokens", "num_heads": "--heads", "num_kv_heads": "--kv-heads", "is_causal": "--causal"}
_OWN = "head_dim", "value_dim", "batch_size", "dtype", "features", "mesh", "axis_name", "node_size", "device"
_FLAGS |= {name: "--" + name.replace("_", "-") for name in (*_OWN, "exchange_size")}


def count_of(text: str) -> int:
    """Returns the number in a text such as 4096, 32k or 1M, where k and M are powers of 1024.

    Raises:
      ArgumentTypeError: if it is none.
    """
    unit = _UNITS.get(text[-1:].lower(), 1)
    try:
        return int(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number: write one such as 4096, 32k or 1M") from None


def branch_of(text: str) -> Branch:
    """Returns the branch in a text such as segments:2048, segments:32k:16, window:4096 or window:512:2.

    Raises:
      ArgumentTypeError: if it is none.
    """
    kind, *numbers = text.split(":")
    kinds: dict[str, type[Any]] = {"segments": Segments, "window": Window}
    if kind not in kinds or not 1 <= len(numbers) <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no branch: write segments:LENGTH[:RATE] or window:SIZE[:RATE]")
    try:
        return kinds[kind](*map(count_of, numbers))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def axis_of(text: str) -> tuple[str, int]:
    """Returns the name and the size in a text such as seq=8.

    Raises:
      ArgumentTypeError: if there are none.
    """
    name, _, size = text.partition("=")
    if not name or not size:
        raise argparse.ArgumentTypeError(f"{text!r} is no axis: write AXIS=SIZE, such as seq=8")
    return name, count_of(size)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    top = argparse.ArgumentParser(prog="ringjax", description="Exact ring and dilated attention for JAX and Flax.")
    commands = top.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "plan",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Compares the strategies for a model on a mesh, before anything runs.",
    )
    add = one.add_argument
    add("branches", nargs="*", type=branch_of, metavar="BRANCH", help="segments:LENGTH[:RATE] or window:SIZE[:RATE]")
    add("--tokens", type=count_of, default=2**20, help="length of the whole sequence; 32k and 1M are powers of 1024")
    add("--heads", type=count_of, default=32, help="query heads")
    add("--kv-heads", type=count_of, help="key/value heads, as many as query heads by default")
    add("--head-dim", type=count_of, default=128, help="width of queries and keys")
    add("--value-dim", type=count_of, help="width of values, that of queries by default")
    add("--batch-size", type=count_of, default=1, help="sequences on the whole mesh")
    add("--dtype", default="bfloat16", help="dtype of the arrays")
    add("--causal", action="store_true", help="queries see no later keys")
    add("--union", action="store_true", help="a pair counts once, however many branches hold it")
    add("--features", nargs="*", default=[], choices=FEATURES, help="arguments that are used")
    add("--mesh", nargs="+", type=axis_of, default=[("seq", 8)], metavar="AXIS=SIZE", help="sizes of the mesh axes")
    add("--axis-name", default="seq", help="axis that the sequence is sharded along")
    add("--node-size", type=count_of, help="devices of a node, as the device has it by default")
    add("--device", default="H100", help=f"{', '.join(MACHINES)}, or a file of figures")
    add("--exchange-size", type=count_of, help="devices that exchange tokens for heads")
    add("--forward", action="store_true", help="count the forward alone, not the gradient")
    add("--json", action="store_true", help="print all figures in JSON")
    add("--plot", metavar="FILE", help="draw bytes, memory and time over the number of devices and of tokens")
    add("--compile", action="store_true", help="compile each strategy, and print that beside what is stated")
    add("--target-config", metavar="FILE", help="description of a GPU that is not there, in XLA's text format")
    add("--measure", metavar="FILE", help="measure the devices of this machine, write FILE for --device, and stop")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status."""
    top = parser()
    options = top.parse_args(arguments)
    try:
        _check(options)
        print_measured(options.measure) if options.measure else print_plan(options)
    except (TypeError, ValueError, OSError) as error:
        print(f"ringjax plan: {_in_flags(str(error))}", file=sys.stderr)
        return 2
    return 0


def _check(options: argparse.Namespace) -> None:
    """Checks what nothing else would, before anything is computed.

    Raises:
      ValueError: for an axis that is named twice, or a file that cannot be read or written.
    """
    names = [name for name, _ in options.mesh]
    if len(set(names)) < len(names):
        text = " ".join(f"{name}={size}" for name, size in options.mesh)
        raise ValueError(f"--mesh {text} names an axis twice: give each once")
    if options.json and options.compile:
        raise ValueError("--json prints figures alone: leave it or --compile out")
    for name in ("plot", "measure"):
        path = getattr(options, name)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"--{name} {path} is in no folder that there is: make it")
    if options.plot is not None and Path(options.plot).suffix not in _PICTURES:
        raise ValueError(f"--plot {options.plot} must end in one of {', '.join(_PICTURES)}")
    if options.target_config is not None and not options.compile:
        raise ValueError("--target-config says what --compile compiles for: give both or neither")
    if options.target_config is not None and not Path(options.target_config).is_file():
        raise ValueError(f"--target-config {options.target_config} is no file: give one in XLA's text format")


def print_measured(path: str) -> None:
    """Measures this machine's devices, writes their figures, and prints them."""
    from ringjax._planner.measure import measure, write  # noqa: PLC0415  # the rest allocates nothing

    machine = measure()
    write(machine, path)
    print(machine)


def _in_flags(message: str) -> str:
    """Names the options of the command in place of the arguments of `plan`, such as --batch-size 3 of batch_size=3."""
    message = re.sub(r"\bmesh\['([^']+)'\]=", r"--mesh \1=", message)
    return re.sub(rf"\b({'|'.join(_FLAGS)})=", lambda found: f"{_FLAGS[found[1]]} ", message)


def print_plan(options: argparse.Namespace) -> None:
    """Prints the comparison, or draws it."""
    comparison = _compare(options)
    if options.compile:
        from ringjax._planner.compiled import find_devices, print_compiled  # noqa: PLC0415  # needs them, or plugins

        devices = find_devices(comparison, options.target_config)  # or says why not, before anything is printed
        print(comparison)
        print_compiled(comparison, devices)
    else:
        print(comparison.to_json() if options.json else comparison)
    if options.plot:
        from ringjax._planner.pictures import plot_plans  # noqa: PLC0415  # matplotlib is an extra

        plot_plans(lambda **sizes: _compare(options, **sizes), options.plot)


def _compare(options: argparse.Namespace, num_tokens: int | None = None, num_devices: int | None = None) -> Comparison:
    mesh = dict(options.mesh)
    if num_devices is not None:
        mesh[options.axis_name] = num_devices
    pattern = DilatedPattern(options.branches or [Segments(options.tokens)], merge="union" if options.union else "lse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table says what they do
        return plan(
            pattern,
            num_tokens=options.tokens if num_tokens is None else num_tokens,
            num_heads=options.heads,
            num_kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            value_dim=options.value_dim,
            batch_size=options.batch_size,
            dtype=options.dtype,
            is_causal=options.causal,
            features=options.features,
            mesh=mesh,
            axis_name=options.axis_name,
            node_size=options.node_size,
            device=options.device,
            exchange_size=options.exchange_size,
            has_gradient=not options.forward,
        )
