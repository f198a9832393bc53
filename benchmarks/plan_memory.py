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
import jax.numpy as jnp
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
    # TPUs compute with so little in their vector memory; what of it lies in both memories, no count can say.
    "small sizes": Size((1024, 2048), (2, 4, 8, 16), (1, 2), cases=10),
}
SEED = 97  # of other draws than the count was fitted to
ROOM = 0.75  # of the memory of a device: what takes more, as counted, is not drawn


def draw_case(draw: random.Random, size: Size) -> tuple[str, dict[str, Any]]:
    """Returns a call of a size, as its options and in words."""
    one_of = lambda *values: draw.choice(values)
    length, heads = 8 * one_of(*size.tokens), one_of(*size.heads)
    kv_heads = heads // one_of(*size.groups)
    count, branches = one_of(1, 1, 2, 3), {}
    while len(branches) < count:  # what is twice the same is computed once
        branches[_draw_branch(draw, length)] = None
    options = {
        "length": length,
        "heads": (heads, kv_heads),
        "width": one_of(64, 128),
        "pattern": tuple(branches),
        "is_causal": draw.random() < 0.7,
        "strategy": one_of("ring", "ring", "all_gather", "all_to_all"),
    }
    kind = f"{'causal' if options['is_causal'] else 'full'} {options['strategy']}"
    sizes = f"T={length}, N={heads}, K={kv_heads}, H={options['width']}"
    return f"{kind}, {sizes}, {' '.join(map(str, branches))}", options


def _draw_branch(draw: random.Random, length: int) -> Branch:
    if draw.random() < 0.25:
        return Window(draw.choice((512, 2048)), draw.choice((1, 1, 4)))
    return Segments(draw.choice((1000, 2048, length // 4, length, length)), draw.choice((1, 1, 2, 4)))


class Program(NamedTuple):
    """The gradient of a call on the devices of a topology."""

    topology: str
    options: dict[str, Any]

    @property
    def machine(self) -> Machine:
        """The figures of a device."""
        return MACHINES[CHIPS[self.topology]]

    def counted(self) -> int:
        """Returns the bytes on a device at the peak, as counted."""
        with jax.enable_x64(False), recording() as records:
            jax.eval_shape(self._attend, *self._arrays())
        call, strategy = records[0].call, self.options["strategy"]
        return forecast(call, strategy, call.schedules(strategy), self.machine).memory

    def compiled(self) -> int:
        """Returns the same as compiled."""
        query, *keys = self._arrays()
        flags: Any = dict(OVERLAP) if self.topology == "8 H100s" else {}
        with jax.enable_x64(False):
            lowered = jax.jit(lambda grad, *arrays: jax.vjp(self._attend, *arrays)[1](grad)).lower(query, query, *keys)
        return memory_of(lowered.compile(flags))

    @property
    def _mesh(self) -> Mesh:
        return make_mesh((8,), ("seq",), devices=devices(*TOPOLOGIES[self.topology]), axis_types=(AxisType.Auto,))

    def _attend(self, *arrays: Any) -> Any:
        named = {name: self.options[name] for name in ("pattern", "is_causal", "strategy")}
        return ring_dilated_attention(*arrays, **named, mesh=self._mesh)

    def _arrays(self) -> list[jax.ShapeDtypeStruct]:
        (heads, kv_heads), sharding = self.options["heads"], NamedSharding(self._mesh, P(None, "seq"))
        shape = lambda count: (1, self.options["length"], count, self.options["width"])
        counts = heads, kv_heads, kv_heads
        return [jax.ShapeDtypeStruct(shape(count), jnp.bfloat16, sharding=sharding) for count in counts]


def draw_programs(topology: str, size: Size) -> Iterator[tuple[str, Program, int]]:
    """Yields as many programs as asked for, each in words and with its bytes as counted: those that find room."""
    draw = random.Random(SEED)
    num_cases = 0
    while num_cases < size.cases:
        case, options = draw_case(draw, size)
        program = Program(topology, options)
        counted = program.counted()
        if counted <= ROOM * program.machine.memory:
            num_cases += 1
            yield case, program, counted


def measure() -> list[dict[str, Any]]:
    """Returns what was counted over what was compiled, in each case."""
    rows = []
    for topology, (name, size) in itertools.product(CHIPS, SIZES.items()):
        for case, program, counted in draw_programs(topology, size):
            value = counted / program.compiled()
            rows.append({"size": name, "topology": topology, "case": case, "value": value})
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
    far = [row for row in found if abs(row["value"] - 1) > 0.3]
    of_far = lambda row: f"{row['topology']}, {row['case']}"
    return rows + [{"claim": "counted over compiled", "case": of_far(row), "value": row["value"]} for row in far]


if __name__ == "__main__":
    print(json.dumps(measure())) if sys.argv[1:] == ["measure"] else main()
