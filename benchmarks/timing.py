"""What the benchmarks share: timing in rounds that take turns, and the yardstick of local speed."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

RESULTS = Path(__file__).parent / "results"
HEADS, WIDTH, STEPS = 8, 64, 64


def time_in_turns(calls: dict[str, Callable[[], Any]], rounds: int = 5) -> dict[str, list[float]]:
    """Returns the seconds of each call in each round; the calls take turns, so that all see the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def yardsticks() -> dict[str, tuple[float, Callable[[], Any]]]:
    """Returns the operations and the call of the least loop that attention must contain, for several block shapes."""

    def loop(query: jax.Array, keys: jax.Array) -> jax.Array:
        def body(j: Any, total: jax.Array) -> jax.Array:
            weights = jnp.exp(jnp.einsum("hqd,hkd->hqk", query, keys[j]))
            return total + jnp.einsum("hqk,hkd->hqd", weights, keys[j])

        return jax.lax.fori_loop(0, STEPS, body, jnp.zeros_like(query))

    compiled = jax.jit(loop)
    found = {}
    for rows in (256, 512):
        for columns in (256, 512):
            query = jnp.full((HEADS, rows, WIDTH), 0.1)
            keys = jnp.full((STEPS, HEADS, columns, WIDTH), 0.1)
            operations = 4.0 * HEADS * rows * columns * WIDTH * STEPS
            found[f"yardstick {rows}x{columns}"] = operations, lambda q=query, k=keys: compiled(q, k)
    return found


def best_rate(operations: float, seconds: list[float]) -> float:
    """Returns operations per second in the best round."""
    return operations / min(seconds)


def spread(values: list[float]) -> float:
    """Returns the range of some values over their median."""
    return (max(values) - min(values)) / statistics.median(values)


def table(rows: list[dict[str, Any]], markdown: bool = False) -> list[str]:
    """Returns the lines of a table of rows, numbers to three digits; what a row lacks is left blank."""
    columns = list({column: None for row in rows for column in row})
    show = lambda value: f"{value:.3g}" if isinstance(value, float) else str(value)
    text = [[show(row.get(column, "")) for column in columns] for row in rows]
    if markdown:
        return ["| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *text)]
    widths = [max(map(len, column)) for column in zip(columns, *text, strict=True)]
    pad = lambda cells: "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
    return [pad(cells) for cells in (columns, *text)]


def processor() -> str:
    """Returns the name of this machine's processor, and the number of its cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.processor()}"


def save(name: str, rows: list[dict[str, Any]]) -> None:
    """Prints rows as a table and writes them as JSON."""
    print("\n".join(table(rows)))
    RESULTS.mkdir(exist_ok=True)
    result = {
        "versions": {"jax": jax.__version__},
        "backend": jax.default_backend(),
        "processor": processor(),
        "rows": rows,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
