"""The planner beside the compiler and the clock: bytes, memory and order of time.

`python -m benchmarks.plan_accuracy`; timings need a quiet machine.
"""

import functools
import itertools
import json
import sys
from typing import Any, NamedTuple

import jax
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.environment import run_module
from benchmarks.timing import save, time_in_turns
from ringjax import DilatedPattern, Segments, Window, ring_dilated_attention
from ringjax._call import Call
from ringjax._pattern.branch import Branch
from ringjax._recording import recording
from ringjax._schedule.strategy import exchange_sizes
from ringjax._tools.forecast import forecast
from ringjax._tools.hlo import bytes_sent
from ringjax._tools.machine import MACHINES
from ringjax._tools.measure import measure

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

    def case(self) -> str:
        """Returns the configuration in words."""
        kind = ("causal " if self.is_causal else "full ") + ("gradient" if self.has_gradient else "forward")
        branches = " ".join(map(str, self.branches))
        return f"{self.strategy}, {kind}, T={self.length}, N={self.heads[0]}, K={self.heads[1]}, {branches}"

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
    strategy, has_gradient = one_of("ring", "all_gather", "all_to_all"), draw(st.booleans())
    # On CPUs collectives are put in an order, which keeps that of an lse that nobody asks for: of its own in half
    # precision, where it is not of the output's dtype.
    dtype = one_of("float32", "float16") if has_gradient else "float32"
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
        has_gradient,
        dtype,
    )


def compiled_bytes(one: Configuration) -> dict[str, int]:
    """Returns the bytes that a device sends in the compiled program, by kinds of collectives."""
    text = jax.jit(one.program(), keep_unused=True).lower(*one.shapes()).compile().as_text()
    return bytes_sent(str(text))


def call_of(one: Configuration) -> Call:
    """Returns the call in integers."""
    with recording() as records:
        jax.eval_shape(lambda *arrays: one.attend(*arrays[:3]), *one.shapes())
    return records[0].call


def stated_bytes(one: Configuration) -> dict[str, int]:
    """Returns the same as the planner states it."""
    call, strategy, sent = call_of(one), one.strategy, {}
    for message in forecast(call, strategy, MACHINES["cpu"], one.has_gradient).messages:
        kind = COLLECTIVES[message.collective]
        sent[kind] = sent.get(kind, 0) + message.num_bytes * message.times
    return sent


# Calls of which some are bound by products and some by messages.
LONG, SHORT = 8192, 1024
_ONE = Configuration(8, LONG, (8, 8), (64, 64), 1, (Segments(LONG),), "lse", "all", "", None, False, False)
_FEW = _ONE._replace(length=SHORT, branches=(Segments(SHORT),))
TIMED = [
    _ONE,
    _ONE._replace(heads=(8, 2), is_causal=True),
    _ONE._replace(branches=(Window(512),), is_causal=True),
    _ONE._replace(heads=(8, 4), branches=(Segments(1024), Segments(LONG, 4)), is_causal=True),
    _ONE._replace(widths=(32, 32), branches=(Segments(2048),)),
    _ONE._replace(length=2 * LONG, widths=(16, 16), branches=(Segments(LONG, 8),)),
    _ONE._replace(is_causal=True, has_gradient=True),
    _FEW,
    _FEW._replace(heads=(16, 16), batch=4, is_causal=True),
    _FEW._replace(heads=(8, 1), widths=(128, 128), is_causal=True),
    _FEW._replace(branches=(Window(64), Segments(SHORT, 4)), is_causal=True, has_gradient=True),
]
STRATEGIES = "ring", "all_gather", "all_to_all"


def timed() -> list[dict[str, Any]]:
    """Returns the measured and the predicted time of each configuration with each strategy, on simulated devices."""
    machine = measure()
    calls, predicted = {}, {}
    for number, (one, strategy) in enumerate(itertools.product(TIMED, STRATEGIES)):
        named = one._replace(strategy=strategy)
        keys = jax.random.split(jax.random.key(number), 4)
        arrays = [
            jax.device_put(jax.random.normal(key, shape.shape, shape.dtype), shape.sharding)
            for key, shape in zip(keys, named.shapes(), strict=True)
        ]
        calls[named] = functools.partial(jax.jit(named.program()), *arrays)
        call = call_of(named)
        predicted[named] = forecast(call, strategy, machine, one.has_gradient).seconds
    seconds = time_in_turns(calls, rounds=3)
    best = lambda one: min(seconds[one])
    return [{"case": one.case(), "measured": best(one), "predicted": predicted[one]} for one in calls]


def clear_pairs(rows: list[dict[str, Any]], ratio: float = 1.5) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the pairs of rows whose times differ by more than a ratio, the slower first."""
    pairs = itertools.permutations(rows, 2)
    return [(slow, fast) for slow, fast in pairs if slow["measured"] > ratio * fast["measured"]]


def _of_one_configuration(pair: tuple[dict[str, Any], dict[str, Any]]) -> bool:
    slow, fast = (row["case"].partition(", ")[2] for row in pair)
    return slow == fast


def _is_misjudged(pair: tuple[dict[str, Any], dict[str, Any]]) -> bool:
    slow, fast = pair
    return slow["predicted"] <= fast["predicted"]


def compared() -> list[dict[str, Any]]:
    """Returns the stated and the compiled bytes of random configurations, which a seed draws."""
    rows = []

    @seed(0)
    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))  # pyright: ignore[reportArgumentType]
    @given(configurations())
    def collect(one: Configuration) -> None:
        stated, compiled = stated_bytes(one), compiled_bytes(one)
        totals = {"stated": sum(stated.values()), "compiled": sum(compiled.values())}
        rows.append({"case": one.case(), **totals, "agree": stated == compiled})

    collect()
    return rows


def main() -> None:
    """Measures, and writes the table."""
    times = run_module("benchmarks.plan_accuracy", "timed")
    sent = run_module("benchmarks.plan_accuracy", "compared")
    clear = clear_pairs(times)
    of_one = list(filter(_of_one_configuration, clear))
    judge = lambda pairs: (len(pairs), sum(map(_is_misjudged, pairs)))
    shares = {
        "random programs that send what is stated": (len(sent), sum(not row["agree"] for row in sent)),
        "pairs of programs in the predicted order of time": judge(clear),
        "pairs of strategies of one configuration in the predicted order": judge(of_one),
    }
    rows: list[dict[str, Any]] = [
        {"claim": f"share of {claim}", "value": 1 - wrong / count, "of": count}
        for claim, (count, wrong) in shares.items()
    ]
    rows += [{"claim": "stated over compiled bytes", **case} for case in map(_disagreement, sent) if case]
    rows += [
        {
            "claim": "measured and predicted ratio of a pair in the wrong order",
            "case": f"{slow['case']} | {fast['case']}",
            "value": slow["measured"] / fast["measured"],
            "predicted": slow["predicted"] / fast["predicted"],
        }
        for slow, fast in filter(_is_misjudged, clear)
    ]
    rows += [
        {"claim": "predicted over measured time", "case": row["case"], "value": row["predicted"] / row["measured"]}
        for row in times
    ]
    save("plan_accuracy", rows)


def _disagreement(row: dict[str, Any]) -> dict[str, Any] | None:
    return None if row["agree"] else {"case": row["case"], "value": row["stated"] / row["compiled"]}


if __name__ == "__main__":
    if sys.argv[1:]:
        jax.config.update("jax_num_cpu_devices", 8)
        print(json.dumps({"timed": timed, "compared": compared}[sys.argv[1]]()))
    else:
        main()
