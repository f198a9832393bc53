"""Random combinations of all arguments against the oracle, with the flags of XLA that users have.

`python -m benchmarks.random_search --programs 1000 --data 10 --seed 0`. Each program runs on several sets of data:
other arrays, documents, sinks, seeds of dropout and, where it is an array, another offset; each set is a case. Programs
run in processes of their own, so that one that aborts or hangs is found as well; those that fail are saved. Each search
adds a row to the results.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import ringjax
from benchmarks.environment import ROOT
from benchmarks.timing import RESULTS, save

PROGRAMS_OF_A_PROCESS, SECONDS_OF_A_PROGRAM = 20, 60
OFFSETS = 0, 3, 40


def draw(rng: np.random.Generator, most_branches: int = 4, data: int = 10) -> dict[str, Any]:
    """Returns the arguments of a call, the shapes of its arrays, the mesh, and seeds of the sets of data."""
    one_of = lambda *choices: choices[rng.integers(len(choices))]
    count, kv_heads = int(rng.integers(1, most_branches + 1)), int(rng.integers(1, 4))
    lengths = [int(rng.integers(1, 70)) for _ in range(count)]
    devices = one_of(1, 2, 3, 4, 5, 6, 7, 8, 8)
    return {
        "length": int(rng.integers(1, 67)),
        "key_length": one_of(None, None, 7, 24),
        "num_heads": [kv_heads * int(rng.integers(1, 3)), kv_heads],
        "batch": one_of([], [2], [1, 2]),
        "documents": one_of(None, None, "sorted", "mixed"),
        "devices": devices,
        "outer_devices": one_of(1, 1, *(size for size in range(2, devices) if devices % size == 0)),
        "has_max_logit": bool(one_of(False, False, True)),
        "is_explicit": bool(one_of(False, True)),
        "is_offset_traced": bool(one_of(False, False, True)),
        "branches": [
            [one_of("Segments", "Segments", "Window"), length, int(rng.integers(1, min(length, 6) + 1))]
            for length in lengths
        ],
        "has_sinks": bool(one_of(False, False, True)),
        "arguments": {
            "offsets": one_of("interleaved", "blocked", "branch"),
            "merge": one_of("lse", "lse", "union"),
            "heads": one_of("all", "all", "grouped") if kv_heads >= count else "all",
            "is_causal": bool(one_of(False, True)),
            "query_offset": one_of(0, 0, *OFFSETS),
            "logits_soft_cap": one_of(None, None, 0.5),
            "dropout_rate": one_of(0.0, 0.0, 0.5),
            "broadcast_dropout": bool(one_of(False, True)),
            "scale": one_of(None, -0.7),
            "uses": one_of("out", "lse", "both"),
        },
        "schedule": {
            "strategy": one_of("ring", "all_gather", "all_to_all", "auto"),
            "block_size": one_of(None, 3, 4, 7),
            "balance": one_of(None, None, "stripes", "zigzag", "none"),
        },
        "data": rng.integers(2**31, size=data).tolist(),
    }


def check(case: dict[str, Any]) -> float:
    """Returns the largest error of all results and gradients, in float64, over all sets of data."""
    from tests import oracle  # noqa: PLC0415  # after jax is set up

    pattern = [getattr(ringjax, kind)(*numbers) for kind, *numbers in case["branches"]]
    arguments = {**case["arguments"], "pattern": pattern}
    outer, kind = case["outer_devices"], AxisType.Explicit if case["is_explicit"] else AxisType.Auto
    mesh = oracle.make_mesh(kind, outer=outer, seq=case["devices"] // outer)
    schedule = {**case["schedule"], "mesh": mesh, "axis_name": ("outer", "seq")}

    @jax.jit
    def results(arrays: Any, sinks: Any, traced: Any) -> Any:
        def loss(query: Any, key: Any, value: Any, *sinks: Any) -> Any:
            own = {**arguments, **schedule, **traced, "sinks": sinks[0] if sinks else None}
            attend = oracle.loss(ringjax.ring_dilated_attention, **own)
            return attend(query, key, value, *arrays[3:])

        inputs = *arrays[:3], *sinks
        found = oracle.with_gradients(loss, tuple(range(len(inputs))))(*inputs)
        return (*found, max_logit(arrays, traced)) if case["has_max_logit"] else found

    def max_logit(arrays: Any, traced: Any) -> Any:
        ids = arrays[3:] if len(arrays) > 4 else next(iter(arrays[3:]), None)
        own = {name: value for name, value in arguments.items() if name != "uses"} | schedule | traced
        return ringjax.ring_dilated_attention(*arrays[:3], document_ids=ids, return_max_logit=True, **own)[-1]

    largest = 0.0
    for seed in case["data"]:
        arrays, sinks, traced = make_data(case, seed)
        actual = jax.device_get(results(arrays, sinks, {name: jnp.asarray(one) for name, one in traced.items()}))
        given = {**arguments, **traced, "sinks": sinks[0] if sinks else None}
        expected = oracle.reference_results(arrays, **given)
        if case["has_max_logit"]:
            expected = *expected, oracle.greatest_logits(arrays, **given)
        for one, other in zip(actual, expected, strict=True):
            with np.errstate(invalid="ignore"):
                error = np.where(one == other, 0, np.abs(one - other))
            largest = max(largest, float(np.where(np.isnan(error), np.inf, error).max(initial=0)))
    return largest


def make_data(case: dict[str, Any], seed: int) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """Returns a set of data: the arrays with their documents, sinks or none, and the arguments that are arrays."""
    from tests import oracle  # noqa: PLC0415

    rng, batch = np.random.default_rng(seed), tuple(case["batch"])
    sides = [case["length"], *([] if case["key_length"] is None else [case["key_length"]])]
    arrays = oracle.random_arguments(sides[0], tuple(case["num_heads"]), (3, 2), batch, sides[-1], seed)
    if case["documents"]:
        is_sorted = case["documents"] == "sorted"
        arrays += tuple(oracle.random_documents(side, batch, is_sorted, seed + n) for n, side in enumerate(sides))
    sinks = (rng.normal(size=case["num_heads"][0], scale=2),) if case["has_sinks"] else ()
    traced: dict[str, Any] = {"dropout_seed": int(rng.integers(2**40))}
    if case["is_offset_traced"]:
        traced["query_offset"] = int(rng.choice(OFFSETS))
    return arrays, sinks, traced


def check_all(cases: list[dict[str, Any]]) -> None:
    """Prints the error of each program, as soon as it is known."""
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    for case in cases:
        print(check(case), flush=True)


def search(cases: list[dict[str, Any]]) -> tuple[float, list[tuple[str, dict[str, Any]]]]:
    """Returns the largest error, and the programs that went wrong, with what happened."""
    errors, failed, rest = [], [], list(cases)
    while rest:
        batch = rest[:PROGRAMS_OF_A_PROCESS]
        command = [sys.executable, "-m", "benchmarks.random_search", "--cases", json.dumps(batch)]
        limit = SECONDS_OF_A_PROGRAM * len(batch)
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
            output, problem = done.stdout, done.stderr.strip().splitlines()[-1:] if done.returncode else None
        except subprocess.TimeoutExpired as error:
            output, problem = (error.stdout or b"").decode(), ["hangs"]
        found = [float(line) for line in output.splitlines()]
        errors += found
        failed += [(f"error {error}", case) for error, case in zip(found, batch, strict=False) if not error < 1e-9]
        if problem is not None:
            failed.append((" ".join(problem) or "ends", batch[len(found)]))
        rest = rest[len(found) + (problem is not None) :]
        print(f"{len(cases) - len(rest)} of {len(cases)} programs, {len(failed)} wrong", file=sys.stderr, flush=True)
    return max(errors, default=0.0), failed


def main() -> None:
    """Draws, checks, saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100, help="programs to draw (default: %(default)s)")
    parser.add_argument("--data", type=int, default=10, help="sets of data for each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the draws (default: the time)")
    parser.add_argument("--save", type=Path, default=Path("failed_cases.json"), help="file of what fails (%(default)s)")
    parser.add_argument("--cases", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cases:
        check_all(arguments.cases)
        return
    print(f"seed {arguments.seed}")
    rng = np.random.default_rng(arguments.seed)
    largest, failed = search([draw(rng, data=arguments.data) for _ in range(arguments.programs)])
    row = {"jax": jax.__version__, "seed": str(arguments.seed), "programs": arguments.programs}
    row |= {"cases": arguments.programs * arguments.data, "wrong": len(failed)}
    result = RESULTS / "random_search.json"
    rows = json.loads(result.read_text())["rows"] if result.exists() else []
    save("random_search", [*rows, {**row, "largest error": largest}])
    if failed:
        arguments.save.write_text(json.dumps(failed, indent=1))
        sys.exit(f"{len(failed)} programs failed: see {arguments.save}")


if __name__ == "__main__":
    main()
