"""The planner beside the compiler and the clock: bytes, memory and order of time.

`python -m benchmarks.plan_accuracy`; timings need a quiet machine.
"""

from typing import Any, NamedTuple

import jax
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.programs import bytes_sent
from ringjax import DilatedPattern, Segments, Window, ring_dilated_attention
from ringjax._branch import Branch
from ringjax._call import recording
from ringjax._forecast import forecast
from ringjax._machine import MACHINES
from ringjax._strategy import exchange_sizes

COLLECTIVES = {
    "permute": "collective-permute",
    "all_to_all": "all-to-all",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}


class Configuration(NamedTuple):
    """A call of attention on simulated devices."""

    num_devices: int
    length: int
    heads: tuple[int, int]
    widths: tuple[int, int]
    batch: int
    branches: tuple[Branch, ...]
    merge: Any
    deal: Any
    strategy: str
    size_number: int | None
    is_causal: bool
    has_gradient: bool
    dtype: str = "float32"

    @property
    def exchange_size(self) -> int | None:
        """How many devices exchange, where that is said."""
        sizes = exchange_sizes(self.num_devices, *self.heads)
        return None if self.size_number is None else sizes[self.size_number % len(sizes)]

    @property
    def pattern(self) -> DilatedPattern:
        """The pattern."""
        return DilatedPattern(self.branches, merge=self.merge, heads=self.deal)

    def attend(self, *arrays: Any) -> jax.Array:
        """Computes it."""
        return ring_dilated_attention(
            *arrays,
            pattern=self.pattern,
            strategy=self.strategy,  # pyright: ignore[reportArgumentType]
            exchange_size=self.exchange_size,
            is_causal=self.is_causal,
            mesh=Mesh(jax.devices()[: self.num_devices], ("seq",), axis_types=(AxisType.Auto,)),
        )

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of queries, keys, values and the output's cotangent, on their devices."""
        mesh = Mesh(jax.devices()[: self.num_devices], ("seq",), axis_types=(AxisType.Auto,))
        sharding, (heads, kv_heads), (width, value_width) = NamedSharding(mesh, P(None, "seq")), self.heads, self.widths
        sizes = (heads, width), (kv_heads, width), (kv_heads, value_width), (heads, value_width)
        shape = lambda *size: jax.ShapeDtypeStruct((self.batch, self.length, *size), self.dtype, sharding=sharding)
        return [shape(*size) for size in sizes]

    def program(self) -> Any:
        """Returns what is compiled: the forward, or the gradients of a cotangent."""
        if not self.has_gradient:
            return lambda query, key, value, out_grad: self.attend(query, key, value)
        return lambda *arrays: jax.vjp(self.attend, *arrays[:3])[1](arrays[3])


@st.composite
def configurations(draw: Any) -> Configuration:
    """Draws a configuration of any pattern and strategy."""
    one_of = lambda *values: draw(st.sampled_from(values))
    num_devices, kv_heads = one_of(2, 4, 8, 6), one_of(1, 2, 4)
    heads, length = kv_heads * one_of(1, 2, 4), num_devices * one_of(16, 32, 48, 37)
    branches = [
        Window(one_of(5, 20, 70), one_of(1, 1, 2, 4))
        if draw(st.booleans())
        else Segments(one_of(8, 16, length // 2, length, length, 50), one_of(1, 1, 2, 4))
        for _ in range(one_of(1, 1, 2, 3))
    ]
    deal = one_of("all", "all", "grouped") if kv_heads >= len(branches) else "all"
    strategy = one_of("ring", "all_gather", "all_to_all")
    return Configuration(
        num_devices,
        length,
        (heads, kv_heads),
        (one_of(4, 6), one_of(4, 8)),
        one_of(1, 2),
        tuple(branches),
        one_of("lse", "union"),
        deal,
        strategy,
        one_of(None, 0, 1, 2) if strategy == "all_to_all" else None,
        draw(st.booleans()),
        draw(st.booleans()),
    )


def compiled_bytes(one: Configuration) -> dict[str, int]:
    """Returns the bytes that a device sends in the compiled program, by kinds of collectives."""
    text = jax.jit(one.program(), keep_unused=True).lower(*one.shapes()).compile().as_text()
    return bytes_sent(str(text))


def stated_bytes(one: Configuration) -> dict[str, int]:
    """Returns the same as the planner states it."""
    with recording() as calls:
        jax.eval_shape(lambda *arrays: one.attend(*arrays[:3]), *one.shapes())
    (call, strategy, *_), sent = calls[0], {}
    for message in forecast(call, strategy, call.schedules(strategy), MACHINES["cpu"], one.has_gradient).messages:
        kind = COLLECTIVES[message.collective]
        sent[kind] = sent.get(kind, 0) + message.num_bytes * message.times
    return sent
