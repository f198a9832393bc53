"""The memory that the planner counts beside that of programs compiled for H100s and a TPU v5e.

`python -m benchmarks.plan_memory`; needs no such device, and installs the plugins of jax into an environment of its
own.
"""

import itertools
import json
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.ahead_of_time import OVERLAP, TOPOLOGIES, devices
from benchmarks.environment import run_module
from benchmarks.timing import save
from ringjax import Segments, Window, make_mesh, ring_dilated_attention
from ringjax._definition.branch import Branch
from ringjax._forecast.forecast import forecast
from ringjax._forecast.machine import MACHINES, Machine
from ringjax._planner.compiled import memory_of
from ringjax._recording import recording

CHIPS = {"8 H100s": "H100", "v5e:2x4": "v5e"}
# Half of the programs have all devices along the sequence.
MESHES = (("seq", 8),), (("seq", 8),), (("data", 2), ("seq", 4)), (("seq", 4), ("tensor", 2))


class Size(NamedTuple):
    """What configurations are drawn from, and how many of them on each kind of devices.

    These are the tokens of a device, the query heads, and how many of these share a key/value head.
    """

    tokens: tuple[int, ...]
    heads: tuple[int, ...]
    groups: tuple[int, ...]
    cases: int


SIZES = {
    "long contexts": Size((65536, 131072), (8, 16, 32), (1, 2, 4, 8), cases=20),
    "sizes of models": Size((8192, 16384, 32768), (16, 32), (1, 2, 4, 8), cases=20),
    # So little that TPUs have most of it in their vector memory.
    "small sizes": Size((1024, 2048), (2, 4, 8, 16), (1, 2), cases=10),
}
SEED = 199  # of other draws than the count was fitted to
ROOM = 0.75  # of the memory of a device: what takes more, as counted, is not drawn


class Program(NamedTuple):
    """A call, or its gradient, on the devices of a topology."""

    topology: str
    axes: tuple[tuple[str, int], ...]  # of the mesh, with their sizes
    length: int
    heads: tuple[int, int]
    width: int
    dtype: str
    pattern: tuple[Branch, ...]
    is_causal: bool
    strategy: str
    has_gradient: bool

    @property
    def machine(self) -> Machine:
        """The figures of a device."""
        return MACHINES[CHIPS[self.topology]]

    def case(self) -> str:
        """Returns the program in words."""
        kind = f"{'causal' if self.is_causal else 'full'} {'gradient' if self.has_gradient else 'forward'}"
        mesh = " ".join(f"{name}={size}" for name, size in self.axes)
        sizes = f"T={self.length}, N={self.heads[0]}, K={self.heads[1]}, H={self.width}"
        return f"{self.strategy}, {kind}, {mesh}, {self.dtype}, {sizes}, {' '.join(map(str, self.pattern))}"

    def counted(self) -> int:
        """Returns the bytes on a device at the peak, as counted."""
        with jax.enable_x64(False), recording() as records:
            jax.eval_shape(self._attend, *self._arrays()[1:])
        call = records[0].call
        return forecast(call, self.strategy, call.schedules(self.strategy), self.machine, self.has_gradient).memory

    def compiled(self) -> int:
        """Returns the same as compiled."""
        flags: Any = dict(OVERLAP) if self.topology == "8 H100s" else {}
        grad, *arrays = self._arrays()
        with jax.enable_x64(False):
            if self.has_gradient:
                pull_back = lambda grad, *arrays: jax.vjp(self._attend, *arrays)[1](grad)
                return memory_of(jax.jit(pull_back).lower(grad, *arrays).compile(flags))
            return memory_of(jax.jit(self._attend).lower(*arrays).compile(flags))

    @property
    def _mesh(self) -> Mesh:
        names, sizes = zip(*self.axes, strict=True)
        types = (AxisType.Auto,) * len(names)
        return make_mesh(sizes, names, devices=devices(*TOPOLOGIES[self.topology]), axis_types=types)

    @property
    def _spec(self) -> P:
        return P(*(name if name in dict(self.axes) else None for name in ("data", "seq", "tensor")))

    def _attend(self, *arrays: Any) -> Any:
        named = {"pattern": self.pattern, "is_causal": self.is_causal, "strategy": self.strategy}
        return ring_dilated_attention(*arrays, **named, mesh=self._mesh, spec=self._spec)

    def _arrays(self) -> list[jax.ShapeDtypeStruct]:
        """The output's cotangent, queries, keys and values."""
        (heads, kv_heads), sharding = self.heads, NamedSharding(self._mesh, self._spec)
        shape = lambda count: (dict(self.axes).get("data", 1), self.length, count, self.width)
        counts = heads, heads, kv_heads, kv_heads
        return [jax.ShapeDtypeStruct(shape(count), self.dtype, sharding=sharding) for count in counts]


def draw_program(draw: random.Random, topology: str, size: Size) -> Program:
    """Returns a program of a size."""
    one_of = lambda *values: draw.choice(values)
    axes = one_of(*MESHES)
    length, heads = dict(axes)["seq"] * one_of(*size.tokens), one_of(*size.heads)
    kv_heads = max(heads // one_of(*size.groups), dict(axes).get("tensor", 1))
    count, branches = one_of(1, 1, 2, 3), {}
    while len(branches) < count:  # what is twice the same is computed once
        branches[_draw_branch(draw, length)] = None
    return Program(
        topology,
        axes,
        length,
        (heads, kv_heads),
        one_of(64, 128),
        one_of("bfloat16", "bfloat16", "float32"),
        tuple(branches),
        draw.random() < 0.7,
        one_of("ring", "ring", "all_gather", "all_to_all"),
        draw.random() < 0.75,
    )


def _draw_branch(draw: random.Random, length: int) -> Branch:
    if draw.random() < 0.25:
        return Window(draw.choice((512, 2048)), draw.choice((1, 1, 4)))
    return Segments(draw.choice((1000, 2048, length // 4, length, length)), draw.choice((1, 1, 2, 4)))


def draw_programs(topology: str, size: Size) -> Iterator[tuple[Program, int]]:
    """Yields as many programs as asked for, each with its bytes as counted: those that find room."""
    draw = random.Random(SEED)
    num_cases = 0
    while num_cases < size.cases:
        program = draw_program(draw, topology, size)
        counted = program.counted()
        if counted <= ROOM * program.machine.memory:
            num_cases += 1
            yield program, counted


def measure() -> list[dict[str, Any]]:
    """Returns what was counted over what was compiled, in each case."""
    rows = []
    for topology, (name, size) in itertools.product(CHIPS, SIZES.items()):
        for program, counted in draw_programs(topology, size):
            value = counted / program.compiled()
            rows.append({"size": name, "topology": topology, "case": program.case(), "value": value})
    return rows


def main() -> None:
    """Compiles everything where the plugins are, and writes the table: the shares, and the cases that are far off."""
    found = run_module("benchmarks.plan_memory", "measure", environment="plugins")
    save("plan_memory", summary(found))


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the shares, of each size on both devices and on each, and the cases that are far off."""
    rows = []
    for size, topology in itertools.product(SIZES, (None, *CHIPS)):
        some = [row for row in found if row["size"] == size and topology in (None, row["topology"])]
        values = np.array([row["value"] for row in some])
        shares = {
            "median of counted over compiled": np.median(values),
            "share within 15 % of the compiled": np.mean(np.abs(values - 1) <= 0.15),
            "share within 30 % of the compiled": np.mean(np.abs(values - 1) <= 0.3),
            "share more than 25 % below the compiled": np.mean(values < 0.75),
        }
        case = size if topology is None else f"{size}, {topology}"
        rows += [{"claim": claim, "case": case, "value": float(of), "of": len(values)} for claim, of in shares.items()]
    far = [row for row in found if abs(row["value"] - 1) > 0.15]
    of_far = lambda row: f"{row['topology']}, {row['case']}"
    return rows + [{"claim": "counted over compiled", "case": of_far(row), "value": row["value"]} for row in far]


if __name__ == "__main__":
    print(json.dumps(measure())) if sys.argv[1:] == ["measure"] else main()
