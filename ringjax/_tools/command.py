"""The command line: `ringjax plan` and `ringjax check`."""

import argparse
import math
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from ringjax._kernels.implementation import NAMES
from ringjax._mesh.axes import named
from ringjax._pattern.branch import Branch, Segments, Window
from ringjax._pattern.pattern import DilatedPattern
from ringjax._schedule.schedule import Balance
from ringjax._tools.comparison import Comparison, wrap
from ringjax._tools.machine import MACHINES
from ringjax._tools.packing import draw_lengths
from ringjax._tools.plan import FEATURES, plan
from ringjax._version import find_version

_PICTURES = ".png", ".svg", ".pdf"
_SIGMA = 1.2  # of the logarithm of the lengths of documents
_UNITS = {"k": 2**10, "m": 2**20}
# The flags for the arguments of `plan`.
_FLAGS = {
    "document_lengths": "--documents",
    "num_tokens": "--tokens",
    "num_heads": "--heads",
    "num_kv_heads": "--kv-heads",
    "is_causal": "--causal",
}
_OWN = "head_dim", "value_dim", "batch_size", "dtype", "features", "mesh", "axis_name", "head_axes", "node_size"
_OTHERS = "device", "balance", "exchange_size", "implementation"
_FLAGS |= {name: "--" + name.replace("_", "-") for name in (*_OWN, *_OTHERS)}


def count_of(text: str) -> int:
    """Returns the number in a text such as 4096, 32k or 1M, where k and M are powers of 1024.

    Raises:
      ArgumentTypeError: if the text is no positive whole number.
    """
    unit = _UNITS.get(text[-1:].lower(), 1)
    number = text[:-1] if unit > 1 else text
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number: write one such as 4096, 32k or 1M")
    return int(number) * unit


def branch_of(text: str) -> Branch:
    """Returns the branch in a text such as segments:2048, segments:32k:16, window:4096 or window:512:2.

    Raises:
      ArgumentTypeError: if the text is no branch.
    """
    kind, *numbers = text.split(":")
    kinds: dict[str, type[Any]] = {"segments": Segments, "window": Window}
    if kind not in kinds or not 1 <= len(numbers) <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no branch: write segments:LENGTH[:RATE] or window:SIZE[:RATE]")
    try:
        return kinds[kind](*map(count_of, numbers))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _axes_of(text: str) -> str | tuple[str, ...]:
    """Returns the axis of the sequence, or several."""
    return tuple(text.split(",")) if "," in text else text


def axis_of(text: str) -> tuple[str, int]:
    """Returns the name and the size in a text such as seq=8.

    Raises:
      ArgumentTypeError: if the text is no axis.
    """
    name, _, size = text.partition("=")
    if not name or not size:
        raise argparse.ArgumentTypeError(f"{text!r} is no axis: write AXIS=SIZE, such as seq=8")
    if "," in size:
        raise argparse.ArgumentTypeError(f"{text!r} is no axis: write several apart, such as data=2 seq=4")
    return name, count_of(size)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in two lines, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists the options\n")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.help is None or action.default in (None, False, argparse.SUPPRESS, []):
            return action.help
        return f"{action.help} (default: {action.default})"


_LEGEND = """\
rows of the table:
  exchange, hops      devices that exchange tokens for heads; hops of keys and values
  messages, sent      what a device sends, in both directions; between nodes, how much of that leaves its node
  holds               bounds of the bytes that a device holds at the peak; --compile asks the compiler
  products, memory    bounds of time: of products at the peak rate, of passes over memory
  links               the time of messages: hidden behind products, or exposed
  bound               of all of it, on the busiest device

example:
  ringjax plan window:1k segments:32k:8 --tokens 32k --heads 8 --causal --mesh seq=8 --device H100
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    top = _Parser(prog="ringjax", description="Exact ring and dilated attention for JAX and Flax.")
    top.add_argument("--version", action="version", version=f"ringjax {find_version()}")
    commands = top.add_subparsers(dest="command", required=True)
    _add_plan(commands)
    one = commands.add_parser(
        "check",
        formatter_class=_Formatter,
        description="Computes attention on the devices at hand by each implementation that serves, and compares\n"
        "output, log-sum-exp, gradients and greatest logits with the definition in float64. Ends with 1\n"
        "if anything is wrong.",
    )
    one.add_argument("--all", action="store_true", help="take every combination of what a call may use, not each pair")
    one.add_argument("--measure", metavar="FILE", help="measure the devices too, and write FILE for plan --device")
    return top


def _add_plan(commands: Any) -> None:
    one = commands.add_parser(
        "plan",
        formatter_class=_Formatter,
        description="Compares the strategies for a model on a mesh, before anything runs.",
        epilog=_LEGEND,
    )
    add = one.add_argument_group("the attention").add_argument
    add("branches", nargs="*", type=branch_of, metavar="BRANCH", help="segments:LENGTH[:RATE] or window:SIZE[:RATE]")
    add("--tokens", type=count_of, default=2**20, help="length of the whole sequence; 32k and 1M are powers of 1024")
    add("--heads", type=count_of, default=32, help="query heads")
    add("--kv-heads", type=count_of, help="key/value heads, as many as query heads by default")
    add("--head-dim", type=count_of, default=128, help="width of queries and keys")
    add("--value-dim", type=count_of, help="width of values, that of queries by default")
    add("--batch-size", type=count_of, default=1, help="sequences on the whole mesh")
    add("--documents", metavar="LENGTHS", help="of packed documents: a file of one a line, or lognormal:MEDIAN[:SIGMA]")
    add("--dtype", default="bfloat16", help="dtype of the arrays")
    add("--causal", action="store_true", help="queries see no later keys")
    add("--union", action="store_true", help="a pair counts once, however many branches hold it")
    add("--features", nargs="*", default=[], choices=FEATURES, help="arguments that are used")
    add("--forward", action="store_true", help="count the forward alone, not the gradient")
    add = one.add_argument_group("the devices").add_argument
    add("--mesh", nargs="+", type=axis_of, metavar="AXIS=SIZE", help="sizes of the mesh axes, seq=8 by default")
    add("--axis-name", type=_axes_of, default="seq", help="axis that the sequence is sharded along, or several: A,B")
    add("--head-axes", nargs="+", default=["tensor"], metavar="AXIS", help="axes that heads are sharded along")
    add("--node-size", type=count_of, help="devices of a node, as the device has it by default")
    add("--device", default="H100", help=f"{', '.join(MACHINES)}, a slice such as v5e:4x4, or a file of figures")
    add("--balance", choices=get_args(Balance), help="how a ring deals its rows: by default stripes for documents")
    add("--exchange-size", type=count_of, help="devices that exchange tokens for heads")
    add("--implementation", choices=tuple(NAMES), help="what computes, the fastest that serves by default")
    add = one.add_argument_group("what is written").add_argument
    add("--json", action="store_true", help="print all figures in JSON")
    add("--plot", metavar="FILE", help="draw bytes, memory and time over the number of devices and of tokens")
    add("--compile", action="store_true", help="compile each strategy, and print that beside what is stated")
    add("--target-config", metavar="FILE", help="description of a GPU that is not there, in XLA's text format")
    add("--measure", metavar="FILE", help="measure the devices of this machine, write FILE for --device, and stop")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    try:
        if options.command == "check":
            return _check_devices(options)
        _check(options)
        if given == ["plan"]:
            print(wrap(f"Without options: {_DEFAULTS}") + "\n")
        print_measured(options.measure) if options.measure else print_plan(options)
    except (TypeError, ValueError, OSError) as error:
        print(f"ringjax {options.command}: {_in_flags(str(error))}", file=sys.stderr)
        return 2
    return 0


_DEFAULTS = "one dense segment of all tokens, not causal, on seq=8 H100s; ringjax plan --help lists what else to say."


def _check_devices(options: argparse.Namespace) -> int:
    from ringjax._tools.check import print_check  # noqa: PLC0415  # the rest allocates nothing

    if options.measure is not None:
        _check_writable("measure", options.measure)
        print_measured(options.measure)
    return 0 if print_check(options.all) else 1


def _check(options: argparse.Namespace) -> None:
    """Checks the options that nothing else checks, and reads the mesh, before anything is computed.

    Raises:
      ValueError: for an axis that is named twice, or a file that cannot be read or written.
    """
    _read_slice(options)
    names = [name for name, _ in options.mesh]
    if len(set(names)) < len(names):
        text = " ".join(f"{name}={size}" for name, size in options.mesh)
        raise ValueError(f"--mesh {text} names an axis twice: give each once")
    if options.json and options.compile:
        raise ValueError("--json prints figures alone: leave out --json or --compile")
    if options.plot is not None and Path(options.plot).suffix not in _PICTURES:
        raise ValueError(f"--plot {options.plot} must end in one of {', '.join(_PICTURES)}")
    for name in ("plot", "measure"):
        if getattr(options, name) is not None:
            _check_writable(name, getattr(options, name))
    if options.target_config is not None and not options.compile:
        raise ValueError("--target-config says what --compile compiles for: give both or neither")
    if options.target_config is not None and not Path(options.target_config).is_file():
        raise ValueError(f"--target-config {options.target_config} is no file: give one in XLA's text format")


def _read_slice(options: argparse.Namespace) -> None:
    """Reads the device, which may be a TPU slice such as v5e:4x4, and by default gives the mesh as many devices.

    Raises:
      ValueError: if the mesh and the slice have different numbers of devices, or several axes have no sizes.
    """
    found = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", options.device)
    count = 8 if found is None else math.prod(map(int, found[2].split("x")))
    *others, axis = named(options.axis_name)
    if others and not options.mesh:
        sizes = " ".join(f"{name}=2" for name in (*others, axis))
        raise ValueError(f"--axis-name {','.join((*others, axis))} names several: give sizes, such as --mesh {sizes}")
    options.mesh = options.mesh or [(axis, count)]
    if found is not None:
        size = math.prod(size for _, size in options.mesh)
        if size != count:
            raise ValueError(f"--device {options.device} has {count} devices, and --mesh {size}: make these equal")
        options.device = found[1]


def _check_writable(name: str, path: str) -> None:
    """Checks that a file can be written, and leaves it as it was.

    Raises:
      ValueError: if it cannot.
    """
    existed = os.path.lexists(path)
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise ValueError(f"--{name} {path} cannot be written ({error.strerror}): name another file") from None
    if not existed:
        Path(path).unlink()


def print_measured(path: str) -> None:
    """Measures this machine's devices, writes their figures, and prints them."""
    from ringjax._tools.measure import measure, write  # noqa: PLC0415  # the rest allocates nothing

    machine = measure()
    write(machine, path)
    print(machine)


def _in_flags(message: str) -> str:
    """Replaces the arguments of `plan` with the flags of the command, such as batch_size=3 with --batch-size 3."""
    message = re.sub(r"\bmesh\['([^']+)'\]=", r"--mesh \1=", message)
    return re.sub(rf"\b({'|'.join(_FLAGS)})=", lambda found: f"{_FLAGS[found[1]]} ", message)


def print_plan(options: argparse.Namespace) -> None:
    """Prints the comparison, or draws it."""
    comparison = _compare(options)
    if options.compile:
        from ringjax._tools.compiled import find_devices, print_compiled  # noqa: PLC0415  # needs devices or plugins

        devices = find_devices(comparison, options.target_config)  # or raises before anything is printed
        print(comparison)
        print_compiled(comparison, devices)
    else:
        print(comparison.to_json() if options.json else comparison)
    if options.plot:
        from ringjax._tools.pictures import plot_plans  # noqa: PLC0415  # matplotlib is an extra

        plot_plans(lambda **sizes: _compare(options, **sizes), options.plot)


def _read_lengths(documents: str | None, num_tokens: int) -> list[int] | None:
    """Returns the lengths of documents: those in a file, or random ones such as lognormal:8k:1.2 describes.

    Raises:
      ValueError: if there are none.
    """
    if documents is None:
        return None
    kind, _, numbers = documents.partition(":")
    try:
        if kind == "lognormal":
            median, _, sigma = numbers.partition(":")
            if not 0 <= (spread := float(sigma or _SIGMA)) < math.inf:
                raise ValueError(f"{sigma} is no standard deviation")
            return draw_lengths(count_of(median), spread, num_tokens)
        return [count_of(line.strip()) for line in Path(documents).read_text().splitlines() if line.strip()]
    except (argparse.ArgumentTypeError, ValueError, OSError) as error:
        raise ValueError(
            f"--documents {documents}: {error}: give a file with one length a line, or lognormal:MEDIAN[:SIGMA] such "
            "as lognormal:8k:1.2"
        ) from None


def _compare(options: argparse.Namespace, num_tokens: int | None = None, num_devices: int | None = None) -> Comparison:
    mesh = dict(options.mesh)
    if num_devices is not None:
        *across, around = named(options.axis_name)
        mesh[around] = num_devices // math.prod(mesh[axis] for axis in across)
    pattern = DilatedPattern(options.branches or [Segments(options.tokens)], merge="union" if options.union else "lse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table says the same
        return plan(
            pattern,
            num_tokens=options.tokens if num_tokens is None else num_tokens,
            num_heads=options.heads,
            num_kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            value_dim=options.value_dim,
            batch_size=options.batch_size,
            document_lengths=_read_lengths(options.documents, options.tokens if num_tokens is None else num_tokens),
            dtype=options.dtype,
            is_causal=options.causal,
            features=options.features,
            mesh=mesh,
            axis_name=options.axis_name,
            head_axes=options.head_axes,
            node_size=options.node_size,
            device=options.device,
            balance=options.balance,
            exchange_size=options.exchange_size,
            implementation=options.implementation,
            has_gradient=not options.forward,
        )
