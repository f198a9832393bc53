"""Compares every implementation that these devices can run with the definition, as `ringjax check` does."""

import dataclasses
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax._attention import ring_dilated_attention
from ringjax._call import Call
from ringjax._kernels.implementation import NAMES
from ringjax._kernels.interface import Request
from ringjax._mesh.mesh import lowered_platform
from ringjax._pattern.branch import Branch, Segments, Window
from ringjax._pattern.pattern import DilatedPattern
from ringjax._pattern.reference import dilated_attention_reference

_WIDTH, _CAP, _DROPOUT = 64, 2.0, 0.1
# The tokens of a device: several tiles of a kernel on accelerators, few on CPUs, which compute the oracle too.
_TOKENS, _TOKENS_ON_CPUS, _TOKENS_OF_ONE = 256, 32, 2048
_MOST_DEVICES = 16
# Bounds of the largest error of a result over its largest number. bfloat16 has 8 significant bits.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.03}
RESULTS = "out", "lse", "dquery", "dkey", "dvalue", "greatest logit"


class Program(NamedTuple):
    """What one call of attention uses; `strategy` is None if one device computes alone."""

    strategy: str | None
    pattern: str
    has_documents: bool
    has_sinks: bool
    has_cap: bool
    has_dropout: bool
    has_groups: bool  # of query heads that share a key/value head
    has_max_logit: bool
    has_two_axes: bool  # of the sequence
    dtype: str

    def __str__(self) -> str:
        features = ("documents", "sinks", "cap", "dropout", "grouped heads", "greatest logit", "two axes")
        used = [name for name, is_used in zip(features, self[2:-1], strict=True) if is_used]
        return ", ".join([self.strategy or "one device", self.pattern, *used, self.dtype])


@dataclasses.dataclass(frozen=True)
class Found:
    """The outcome of a program with an implementation: the error of each result, and its time over XLA's.

    If it could not be computed, `failure` says why.
    """

    program: Program
    implementation: str
    errors: tuple[float, ...] = ()
    time_over_xla: float | None = None
    failure: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether it was computed, and no error is above its bound."""
        return self.failure is None and max(self.errors) <= BOUNDS[self.program.dtype]


def check(take_all: bool = False, devices: Sequence[Any] | None = None) -> Iterator[tuple[str, list[Found]]]:
    """Yields the name of each program twice: with an empty list before it runs, and with its outcomes after.

    Args:
      take_all: whether to check all programs; else a few that contain every pair of choices, see `cover`.
      devices: the devices; by default the first 16 at most, because the definition's memory grows with the square of
        their tokens.
    """
    devices = list(jax.devices()[:_MOST_DEVICES] if devices is None else devices)
    candidates = [Program(*choices) for choices in itertools.product(*_levels(len(devices)))]
    names_of: dict[Program, list[str]] = {}
    for name in NAMES:
        served = [program for program in candidates if _serves(program, name, devices)]
        for program in served if take_all else cover(served):
            names_of.setdefault(program, []).append(name)
    for number, program in enumerate(sorted(names_of, key=candidates.index)):
        title = f"{number + 1} of {len(names_of)}: {program}"
        yield title, []
        yield title, _check_program(program, names_of[program], devices)


def _check_program(program: Program, names: Sequence[str], devices: Sequence[Any]) -> list[Found]:
    """Returns the outcomes of a program with each of these implementations."""
    oracle, is_timed = _oracle(program, devices), devices[0].platform != "cpu" and [*names] != ["xla"]
    seconds_of_xla, founds = None, []
    for name in dict.fromkeys(["xla", *names] if is_timed else names):
        try:
            call = _compile(program, name, devices)
            errors = _errors(jax.device_get(call()), oracle)
            seconds = _seconds(call) if is_timed else None
        except Exception as error:  # of any kind, so that the other implementations are still checked
            first = str(error).strip().partition("\n")[0]
            founds.append(Found(program, name, failure=f"{type(error).__name__}: {first}"))
            continue
        seconds_of_xla = seconds if seconds_of_xla is None else seconds_of_xla
        founds.append(Found(program, name, errors, seconds / seconds_of_xla if seconds and seconds_of_xla else None))
    return [found for found in founds if found.implementation in names]


def _levels(num_devices: int) -> tuple[Sequence[Any], ...]:
    """Returns the choices of each field of a program."""
    strategies = (None, "ring", "all_to_all", "all_gather") if num_devices > 1 else (None,)
    two_axes = (False, True) if num_devices > 2 and num_devices % 2 == 0 else (False,)
    return strategies, ("dense", "dilated", "windows"), *6 * [(False, True)], two_axes, tuple(BOUNDS)


def cover(candidates: Sequence[Program]) -> list[Program]:
    """Returns a few programs that contain every pair of choices that occurs in any candidate."""
    # Each choice comes with the number of its field.
    pairs_of = {one: frozenset(itertools.combinations(enumerate(one), 2)) for one in candidates}

    def greedy(candidates: Sequence[Program]) -> list[Program]:
        missing, chosen = frozenset().union(*pairs_of.values()), []
        while missing:
            chosen.append(max(candidates, key=lambda one: len(pairs_of[one] & missing)))
            missing -= pairs_of[chosen[-1]]
        return chosen

    orders = [list(candidates), *(random.Random(seed).sample(candidates, len(candidates)) for seed in range(8))]
    return sorted(min(map(greedy, orders), key=len), key=candidates.index)


def _sizes(program: Program, devices: Sequence[Any]) -> tuple[int, int, int]:
    """Returns the tokens, the query heads and the key/value heads."""
    if devices[0].platform == "cpu":
        least = _TOKENS_ON_CPUS * max(8, len(devices))
    else:
        least = max(_TOKENS_OF_ONE, _TOKENS * len(devices))
    multiple = 32 * len(devices)  # patterns divide the tokens by up to 32, and devices by their number
    return -(-least // multiple) * multiple, 4, 2 if program.has_groups else 4


def _branches(program: Program, length: int) -> list[Branch]:
    return {
        "dense": [Segments(length)],
        "dilated": [Segments(length // 8), Segments(length, 2)],
        "windows": [Window(length // 16), Window(length // 32, 4)],
    }[program.pattern]


def _serves(program: Program, implementation: str, devices: Sequence[Any]) -> bool:
    """Returns whether an implementation can compute a program, from integers alone."""
    if program.has_two_axes and program.strategy is None:
        return False
    count = len(devices) if program.strategy else 1
    length, num_heads, num_kv_heads = _sizes(program, devices)
    shape = lambda heads: jax.ShapeDtypeStruct((1, length, heads, _WIDTH), program.dtype)
    used = {
        "document_ids": program.has_documents,
        "logits_soft_cap": program.has_cap,
        "dropout_rate": program.has_dropout,
        "return_max_logit": program.has_max_logit,
    }
    request = Request(
        shape(num_heads),
        shape(num_kv_heads),
        shape(num_kv_heads),
        lowered_platform(devices[0].platform),
        needs=tuple(name for name, is_used in used.items() if is_used),
        needs_lse=True,
        device_kind=devices[0].device_kind,
        documents_are_sorted=True,
    )
    call = Call(
        request,
        pattern=DilatedPattern(_branches(program, length)),
        num_queries=length,
        num_keys=length,
        query_offset=0,
        num_devices=count,
        num_inner_devices=count // 2 if program.has_two_axes else None,
        batch=1,
        num_heads=num_heads,
        num_unmapped=1,
        document_itemsize=4 * program.has_documents,
        is_causal=True,
        implementation=implementation,
    )
    return call.obstacle(call.schedules(program.strategy or "ring")) is None


def _arguments(program: Program, devices: Sequence[Any]) -> tuple[list[np.ndarray], dict[str, Any], list[np.ndarray]]:
    """Returns the arrays, other arguments, and the cotangents of both results."""
    rng = np.random.default_rng(0)
    length, num_heads, num_kv_heads = _sizes(program, devices)
    heads = num_heads, num_kv_heads, num_kv_heads, num_heads
    # Rounded to the program's dtype, so that the oracle computes with the same numbers.
    round_ = lambda array: np.asarray(jnp.asarray(array, program.dtype), np.float32)
    *arrays, out_grad = (round_(rng.normal(size=(1, length, count, _WIDTH))) for count in heads)
    lse_grad = rng.normal(size=(1, length, num_heads)).astype(np.float32)
    arguments: dict[str, Any] = {"pattern": _branches(program, length), "is_causal": True}
    if program.has_documents:
        arguments["document_ids"] = np.sort(rng.integers(5, size=(1, length)), axis=1).astype(np.int32)
    if program.has_sinks:
        arguments["sinks"] = rng.normal(size=num_heads).astype(np.float32)
    arguments |= {"logits_soft_cap": _CAP} if program.has_cap else {}
    arguments |= {"dropout_rate": _DROPOUT, "dropout_seed": 1} if program.has_dropout else {}
    return arrays, arguments, [out_grad, lse_grad]


def _oracle(program: Program, devices: Sequence[Any]) -> list[np.ndarray]:
    """Returns all results of the definition, computed in float64 on the host's CPU."""
    arrays, arguments, cotangents = _arguments(program, devices)
    try:
        host = jax.devices("cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            "JAX_PLATFORMS leaves out the CPU, on which the definition is computed: add it, such as cuda,cpu"
        ) from error
    with jax.enable_x64(True), jax.default_device(host):
        wide, *cotangents = ([jnp.asarray(array, jnp.float64) for array in some] for some in (arrays, cotangents))
        return list(map(np.asarray, _results(dilated_attention_reference, program, wide, *cotangents, **arguments)))


def _compile(program: Program, implementation: str, devices: Sequence[Any]) -> Callable[[], Any]:
    """Returns a function that runs the compiled program and its gradient."""
    arrays, arguments, cotangents = _arguments(program, devices)
    axes, shape = (("outer", "seq"), (2, -1)) if program.has_two_axes else (("seq",), (-1,))
    on = np.array(devices if program.strategy else devices[:1]).reshape(shape)
    mesh = Mesh(on, axes, axis_types=(AxisType.Auto,) * len(axes))
    place = lambda array: jax.device_put(array, NamedSharding(mesh, P(None, axes)))
    named = {name: arguments.pop(name) for name in ("document_ids", "sinks") if name in arguments}
    more = {"strategy": program.strategy or "ring", "implementation": implementation, "mesh": mesh, "axis_name": axes}
    more |= {"documents_are_sorted": True} if program.has_documents else {}
    more |= {"precision": "highest"} if program.dtype == "float32" else {}

    def run(arrays: Any, cotangents: Any, named: Any) -> Any:
        return _results(ring_dilated_attention, program, arrays, cotangents, **named, **arguments, **more)

    given = [place(jnp.asarray(array, program.dtype)) for array in arrays], list(map(place, cotangents))
    if "document_ids" in named:
        named["document_ids"] = place(named["document_ids"])
    compiled = jax.jit(run).lower(*given, named).compile()
    return lambda: compiled(*given, named)


def _results(
    function: Callable[..., Any], program: Program, arrays: Sequence[Any], cotangents: Sequence[Any], **arguments: Any
) -> tuple[Any, ...]:
    """Returns the results of a function of attention, in the order of `RESULTS`."""

    def attend(*arrays: Any) -> Any:
        out, lse, *greatest = function(
            *arrays, return_residual=True, return_max_logit=program.has_max_logit, **arguments
        )
        return (out, lse), greatest

    results, pullback, greatest = jax.vjp(attend, *arrays, has_aux=True)
    grads = pullback(jax.tree.map(lambda array, result: array.astype(result.dtype), tuple(cotangents), results))
    return *results, *grads, *greatest


def _errors(results: Sequence[Any], expected: Sequence[np.ndarray]) -> tuple[float, ...]:
    """Returns, for each result, the largest error over the largest finite number that is expected."""
    errors = []
    for result, other in zip(results, expected, strict=True):
        one = np.asarray(result, np.float64)
        with np.errstate(invalid="ignore"):
            error = np.where(one == other, 0, np.abs(one - other))
        error = np.where(np.isnan(error), np.inf, error)
        errors.append(float(error.max() / np.abs(other[np.isfinite(other)]).max(initial=1e-30)))
    return tuple(errors)


def _seconds(call: Callable[[], Any]) -> float:
    def once() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - begin

    return statistics.median([once() for _ in range(11)][1:])  # the first one warms up


def print_check(take_all: bool = False) -> bool:
    """Prints a table of all programs, with a line of progress, and returns whether all are right."""
    founds: list[Found] = []
    for title, some in check(take_all):
        founds += some
        if not some and sys.stderr.isatty():
            print(f"\r\x1b[K{title}", end="", file=sys.stderr, flush=True)
        elif not some:
            print(title, file=sys.stderr, flush=True)
    print("\r\x1b[K" if sys.stderr.isatty() else "", end="", file=sys.stderr)
    lines: list[tuple[str, ...]] = [("implementation", *RESULTS, "time over XLA's", "", "program")]
    for found in sorted(founds, key=lambda one: one.implementation):
        ratio = "-" if found.time_over_xla is None else f"{found.time_over_xla:.2f}"
        verdict = "right" if found.is_right else "WRONG" if found.failure is None else "FAILED"
        errors = [f"{error:.0e}" for error in found.errors]
        errors += ["-"] * (len(RESULTS) - len(errors))
        lines.append((found.implementation, *errors, ratio, verdict, str(found.program)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
    for found in founds:
        if found.failure is not None:
            print(f"\n{found.implementation}, {found.program}: {found.failure}")
    wrong, devices = sum(not found.is_right for found in founds), jax.devices()[:_MOST_DEVICES]
    bounds = " and ".join(f"{bound:g} in {dtype}" for dtype, bound in BOUNDS.items())
    print(f"\n{len(founds)} results on {len(devices)} x {devices[0].device_kind}, {wrong} wrong.")
    print(f"Errors are over the largest number of a result, beside the definition in float64: at most {bounds}.")
    return not wrong
