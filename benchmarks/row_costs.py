"""What a pattern costs beside its blocks: selecting rows, merging branches, and having many short segments.

`python -m benchmarks.row_costs`; each case runs in a process of its own.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import run_module
from benchmarks.local_speed import CASES, calls_of
from benchmarks.timing import HEADS, WIDTH, best_rate, save, spread, time_in_turns
from ringjax._kernels.tiles import Partial
from ringjax._parallel.combine import Gradients, Outputs
from ringjax._parallel.layout import Task
from ringjax._parallel.ring import Addends

LONGNET, SHORT = "LongNet, causal, T=32768", "many short segments, T=8192"


def leave_out_blocks() -> None:
    """Makes every branch return its rows as they are: what is left selects rows and merges branches."""

    def forward(task: Task) -> Partial:
        query = task.take(task.queries).arrays
        return Partial(query[..., 0], jnp.ones_like(query[..., 0]), query)

    def backward(task: Task) -> Addends:
        queries, keys = task.take(task.queries).arrays, task.take(task.keys).arrays
        return Addends(queries.query, *keys)

    Outputs.by_strategy["ring"], Gradients.by_strategy["ring"] = forward, backward


def batched_einsum(length: int, branches: Any, *_: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Returns the calls of plain attention with each segment as one of a batch."""
    arrays = [jnp.asarray(a, jnp.float32) for a in np.random.default_rng(0).normal(size=(3, 1, length, HEADS, WIDTH))]

    def attend(*arrays: jax.Array) -> jax.Array:
        segments = (array.reshape(-1, branches[0].length, HEADS, WIDTH) for array in arrays)
        return jax.nn.dot_product_attention(*segments).reshape(arrays[0].shape)

    forward = jax.jit(attend)
    gradient = jax.jit(jax.grad(lambda *arrays: attend(*arrays).sum(), (0, 1, 2)))
    return lambda: forward(*arrays), lambda: gradient(*arrays)


def measure(case: str) -> None:
    """Times forward and gradient of one case, and prints the seconds as JSON."""
    if case == "einsum":
        forward, gradient = batched_einsum(*CASES[SHORT])
    else:
        if case == "rows":
            leave_out_blocks()
        _, forward, gradient = calls_of(*CASES[SHORT if case == "short" else LONGNET])
    print(json.dumps(time_in_turns({"forward": forward, "gradient": gradient})))


def main() -> None:
    """Measures all cases in turns, and writes the table."""
    runs: dict[str, dict[str, list[float]]] = {}
    for case in ("rows", "LongNet", "einsum", "short") * 2:
        for direction, seconds in run_module("benchmarks.row_costs", case).items():
            runs.setdefault(case, {}).setdefault(direction, []).extend(seconds)
    comparisons = {
        "selecting and merging, of LongNet's time": ("rows", "LongNet"),
        "short segments, beside a batched einsum": ("einsum", "short"),
    }
    rows = [
        {
            "claim": claim,
            "direction": direction,
            "ratio of times": best_rate(1, runs[other][direction]) / best_rate(1, runs[one][direction]),
            "spread of times": spread(runs[one][direction]),
        }
        for claim, (one, other) in comparisons.items()
        for direction in ("forward", "gradient")
    ]
    save("row_costs", rows)


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
