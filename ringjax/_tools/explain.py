"""Explains the calls of a function: where each finds its mesh, what it sends, and what would be faster."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from ringjax._attention import ring_dilated_attention
from ringjax._call import Call
from ringjax._mesh.mesh import Target, traced_for
from ringjax._pattern.warning import warning_anew
from ringjax._recording import Record, recording
from ringjax._tools.comparison import Comparison, compare, wrap
from ringjax._tools.forecast import forecast
from ringjax._tools.machine import Machine, find_machine, machine_of

_NUMBERS = itertools.count()


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The explained attention calls of a function; `str` returns a text.

    Args:
      calls: for each different call, the comparison of its strategies, its own first, and how often it is made.
      places: for each call, which devices it runs on, and how these were found.
      warnings: the warnings of the calls.
    """

    calls: tuple[tuple[Comparison, int], ...]
    places: tuple[str, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        parts = []
        for (comparison, count), place in zip(self.calls, self.places, strict=True):
            times = "once" if count == 1 else f"{count} times"
            parts += [wrap(f"Called {times}: {place}"), "", comparison.report(), ""]
        said = {comparison.problem for comparison, _ in self.calls}
        return "\n".join([*parts, *(wrap(f"Warning: {text}") for text in self.warnings if text not in said)]).rstrip()


def explain(
    function: Callable[..., Any] | Any, *arguments: Any, device: str | Machine | None = None, **keywords: Any
) -> Explanation:
    """Explains the calls of attention in a function, from shapes alone: nothing is compiled, no array is made.

    Under :func:`jax.vmap` it counts one instance.

    Args:
      function: a function, a module, or a jitted one; or the query of :func:`ring_dilated_attention`, whose arguments
        are then the rest.
      *arguments: its arguments, arrays or :class:`jax.ShapeDtypeStruct`.
      device: the device to forecast for, and whose kernels may serve, see :func:`plan`; by default that of the mesh.
      **keywords: its keyword arguments.

    Returns:
      For each different call the mesh axis and where it was found, the hops, the implementation and why no faster one
      serves, and the comparison of the strategies; and all warnings.

    Raises:
      ValueError: if the function makes no call of :func:`ring_dilated_attention`.
      TypeError: if the first argument is neither a function nor an array.

    Example:
      >>> from ringjax import Segments
      >>> shape = jax.ShapeDtypeStruct((1, 64, 4, 8), jnp.float32)
      >>> print(explain(shape, shape, shape, pattern=[Segments(64)]).places[0])
      no mesh: one device computes all 64 tokens
    """
    if not (callable(function) or hasattr(function, "shape")):
        raise TypeError(f"function={function!r} must be a function or a module, or the query of a call")
    if not callable(function):
        function, arguments = ring_dilated_attention, (function, *arguments)
    # Static arguments, such as a pattern, stay as they are.
    is_array = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    leaves, tree = jax.tree.flatten((function, arguments, keywords))  # a module has arrays, too
    arrays = [leaf for leaf in leaves if is_array(leaf)]

    def call(*arrays: Any) -> Any:
        given = iter(arrays)
        leaves_given = [next(given) if is_array(leaf) else leaf for leaf in leaves]
        called, arguments, keywords = jax.tree.unflatten(tree, leaves_given)
        return called(*arguments, **keywords)

    # jax caches traces, and a cached call would not be recorded: unique metadata forces a new trace.
    own = set_xla_metadata(explanation=str(next(_NUMBERS)))
    machine = None if device is None else find_machine(device)
    target = None if machine is None else Target(machine.platform, machine.name)
    with (
        recording() as records,
        warnings.catch_warnings(record=True) as caught,
        warning_anew(),
        traced_for(target),
        own,
    ):
        warnings.simplefilter("always")
        jax.eval_shape(call, *arrays)
        found: dict[Any, list[Record]] = {}
        for one in records:
            found.setdefault((*_key(one.call), *one[1:]), []).append(one)
        calls = tuple((_compare(same[0], machine), len(same)) for same in found.values())
    if not records:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"{name} does not call ringjax.ring_dilated_attention: decode_attention and decode=True are not "
            "explained, so give the function or the module that trains or reads a prompt"
        )
    places = tuple(_place(same[0]) for same in found.values())
    texts = dict.fromkeys(str(warning.message) for warning in caught)
    return Explanation(calls, places, tuple(texts))


def _key(call: Call) -> tuple[Any, ...]:
    """Returns what equal calls share: everything but the arrays, of which only dtypes, heads and widths count."""
    fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call) if field.name != "request"}
    request = call.request
    return *fields.values(), *((str(array.dtype), array.shape[-2:]) for array in request[:3]), request[3:]


def _compare(record: Record, machine: Machine | None) -> Comparison:
    call, strategy, placement, _ = record
    machine = machine_of(call.request.platform, call.request.device_kind) if machine is None else machine
    comparison = compare(call, machine, axis_name=placement.axis_name or "seq")
    name = strategy if isinstance(strategy, str) else "mixed"
    own = dataclasses.replace(forecast(call, strategy, comparison.machine), strategy=f"{name} (this call)")
    return dataclasses.replace(comparison, forecasts=(own, *comparison.forecasts))


def _place(record: Record) -> str:
    call, _, placement, source = record
    if not placement.axes:
        where = "no mesh" if source == "nowhere" else f"the mesh from {source} has no sequence axis"
        return f"{where}: one device computes all {call.num_queries:,} tokens"
    axes = f"the mesh {'axes' if len(placement.axes) > 1 else 'axis'} {placement.axis_name!r}"
    where = f"the {placement.num_shards} devices of {axes}, which {'are' if len(placement.axes) > 1 else 'is'} from"
    return f"{call.num_queries:,} tokens on {where} {source}"
