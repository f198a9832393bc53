"""One device's attention as a share of the rate at which the machine runs the least loop that it must contain.

`python -m benchmarks.local_speed`
"""

import json
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringjax
from benchmarks.environment import run_module
from benchmarks.timing import HEADS, WIDTH, best_rate, save, spread, time_in_turns, yardsticks
from ringjax import Segments, Window
from ringjax._pattern.branch import Branch

LONGNET: list[Branch] = [Segments(2048 * rate, rate) for rate in (1, 2, 4, 8, 16)]
CASES: dict[str, tuple[int, list[Branch], bool]] = {
    "full, T=8192": (8192, [Segments(8192)], False),
    "causal, T=8192": (8192, [Segments(8192)], True),
    "many short segments, T=8192": (8192, [Segments(64)], False),
    "LongNet, causal, T=32768": (32768, LONGNET, True),
    "causal window of 1024, T=32768": (32768, [Window(1024)], True),
}


def count_pairs(branch: Branch, length: int, is_causal: bool) -> float:
    """Returns the pairs that a head keeps of a branch, on average over its offsets."""
    query = np.arange(length)
    counts = [branch.count(query, 0, length, offset, length, is_causal).sum() for offset in range(branch.offset_rate)]
    return float(np.mean(counts))


def calls_of(length: int, branches: list[Branch], is_causal: bool) -> tuple[float, Any, Any]:
    """Returns the operations of the kept pairs, the forward call, and the call of the gradient."""
    arrays = [jnp.asarray(a, jnp.float32) for a in np.random.default_rng(0).normal(size=(3, 1, length, HEADS, WIDTH))]
    operations = 4 * HEADS * WIDTH * sum(count_pairs(branch, length, is_causal) for branch in branches)

    def attend(*arrays: jax.Array) -> Any:
        return ringjax.ring_dilated_attention(*arrays, pattern=branches, is_causal=is_causal)

    forward = jax.jit(attend)
    gradient = jax.jit(jax.grad(lambda *arrays: attend(*arrays).sum(), (0, 1, 2)))
    return operations, lambda: forward(*arrays), lambda: gradient(*arrays)


def measure(name: str) -> None:
    """Times one case beside the yardsticks, and prints the rows of the table as JSON."""
    operations, forward, gradient = calls_of(*CASES[name])
    yards = yardsticks()
    calls = {**{yard: call for yard, (_, call) in yards.items()}, "forward": forward, "gradient": gradient}
    seconds = time_in_turns(calls)
    yard = max(best_rate(count, seconds[key]) for key, (count, _) in yards.items())
    rows = [
        {
            "case": name,
            "direction": direction,
            "rate over yardstick": best_rate(factor * operations, seconds[direction]) / yard,
            "median rate over yardstick": factor * operations / statistics.median(seconds[direction]) / yard,
            "spread of times": spread(seconds[direction]),
        }
        for direction, factor in (("forward", 1.0), ("gradient", 3.5))
    ]
    print(json.dumps(rows))


def main() -> None:
    """Measures each case in a process of its own, and writes the table."""
    save("local_speed", [row for name in CASES for row in run_module("benchmarks.local_speed", name)])


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
