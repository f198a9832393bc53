"""Checks and measures attention on one NVIDIA GPU, beside cuDNN's dense attention and torch: everything in one command.

`python benchmarks/on_gpu.py [FOLDER]` writes `gpu_*.json` to benchmarks/results or to FOLDER, and prints the tables.
`python benchmarks/on_gpu.py --rehearse` runs the same code at small sizes on any device, and writes nothing.
`--only=NAME,NAME` takes some of the measures. First all of them run once, each in a process of its own, beside each
other: that compiles their programs, and says which of them end. Then they are measured, one by one.
"""

import dataclasses
import datetime
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory as well
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
# What is compiled is kept, for the next process.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "ringjax-on-gpu"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import jax.numpy as jnp
import numpy as np

import ringjax
from benchmarks.timing import table
from ringjax._kernels import rows as own_rows
from ringjax._kernels.attention_step import AttentionStep, PaddedRows
from ringjax._kernels.hopper import chains
from ringjax._kernels.implementation import IMPLEMENTATIONS
from ringjax._kernels.interface import Request, per_row
from ringjax._kernels.softmax import Keys, Weighting, merge
from ringjax._schedule.make import make_schedule
from ringjax._schedule.schedule import BranchSchedule

REHEARSAL = "--rehearse" in sys.argv
ONCE = "--once" in sys.argv  # nothing is measured
KERNEL, PALLAS = ("xla", "xla") if REHEARSAL else ("cudnn", "mosaic")
SHRINK = 64 if REHEARSAL else 1
HEADS, ROUNDS = (2, 2) if REHEARSAL else (16, 20)
WIDTHS = (16,) if REHEARSAL else (64, 128)
KEPT = 2048 // SHRINK
RATES = (1, 2, 4, 8, 16)
LONGNET = tuple(KEPT * rate for rate in RATES), RATES
LENGTH, PACKED, LONG = 8192 // SHRINK, 32768 // SHRINK, 131072 // SHRINK
DOCUMENTS = 16  # that are packed
CASES = "plain", "documents", "union", "soft cap", "dropout"
# The seconds that a process may take to answer, and the processes beside each other.
PATIENCE, PROCESSES = 150, 8

Arrays = tuple[jax.Array, ...]
Rows = list[dict[str, Any]]
Call = Callable[[], Any]


def random(length: int, width: int, count: int = 3, heads: int = HEADS, batch: int = 1) -> Arrays:
    """Returns so many arrays [batch, length, heads, width] in bfloat16."""
    keys = jax.random.split(jax.random.key(0), count)
    return tuple(jax.random.normal(key, (batch, length, heads, width), jnp.bfloat16) for key in keys)


def ours(
    *arrays: jax.Array, pattern: tuple[tuple[int, ...], tuple[int, ...]], is_causal: bool, implementation: Any = KERNEL
) -> jax.Array:
    """Computes attention by a fused kernel."""
    segment_lengths, dilation_rates = pattern
    out: Any = ringjax.ring_dilated_attention(
        *arrays,
        segment_lengths=segment_lengths,
        dilation_rates=dilation_rates,
        is_causal=is_causal,
        implementation=implementation,
    )
    return out


def dense(*arrays: jax.Array, is_causal: bool) -> jax.Array:
    """Computes dense attention by what jax offers for it."""
    return jax.nn.dot_product_attention(*arrays, is_causal=is_causal, implementation=KERNEL)


def _mask(is_causal: bool) -> str:
    return "causal" if is_causal else "full"


def directions(function: Callable[..., Any], arrays: Arrays) -> dict[str, Call]:
    """Returns the calls of a function's forward, of its backward alone, and of both."""
    out, pullback = jax.jit(lambda *arrays: jax.vjp(function, *arrays))(*arrays)
    forward = jax.jit(function)
    backward = jax.jit(lambda pullback, cotangent: pullback(cotangent))
    both = jax.jit(lambda cotangent, *arrays: jax.vjp(function, *arrays)[1](cotangent))
    return {
        "forward": lambda: forward(*arrays),
        "backward": lambda: backward(pullback, out),
        "gradient": lambda: both(out, *arrays),
    }


def device_seconds(*calls: Call) -> list[float]:
    """Returns the seconds of each call, in turns: of many in a queue, so that the device never waits for the host."""
    for call in calls:
        jax.block_until_ready(call())
    if ONCE:
        return [1.0] * len(calls)
    counts = [max(1, min(ROUNDS, int(0.1 / _queue(call, 1)))) for call in calls]
    turns = [[_queue(call, count) for call, count in zip(calls, counts, strict=True)] for _ in range(5)]
    return [statistics.median(times) for times in zip(*turns, strict=True)]


def _queue(call: Call, count: int) -> float:
    begin, result = time.perf_counter(), None
    for _ in range(count):
        result = call()  # the one before is freed: a device computes calls in order
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / count


def compare(one: dict[str, Call], other: dict[str, Call], names: tuple[str, ...]) -> dict[str, float]:
    """Returns the time of the other over that of the one: above 1 where the one is faster."""
    times = {name: device_seconds(one[name], other[name]) for name in names}
    return {name: of_other / of_one for name, (of_one, of_other) in times.items()}


def one_branch() -> Rows:
    """The branch (T, 1), beside cuDNN's dense attention."""
    rows = []
    for width in WIDTHS:
        for length in (8192 // SHRINK, 32768 // SHRINK):
            for is_causal in (False, True):
                arrays = random(length, width)
                attend = functools.partial(ours, pattern=((length,), (1,)), is_causal=is_causal)
                plain = functools.partial(dense, is_causal=is_causal)
                ratios = compare(directions(attend, arrays), directions(plain, arrays), ("forward", "backward"))
                rows.append({"case": f"{_mask(is_causal)}, T={length}, H={width}", **ratios})
    return rows


def longnet() -> Rows:
    """Five branches of 2048 rows: their rate over kept pairs, beside dense segments, dense attention and torch."""
    rows, names = [], ("forward", "gradient")
    for width in WIDTHS:
        for is_causal in (False, True):
            arrays = random(LONG, width)
            calls = directions(functools.partial(ours, pattern=LONGNET, is_causal=is_causal), arrays)
            segments = tuple(array.reshape(-1, KEPT, HEADS, width) for array in arrays)
            batch = directions(functools.partial(dense, is_causal=is_causal), segments)
            pairs = sum(1 / rate for rate in RATES)  # of those of the dense segments
            row: dict[str, Any] = {"case": f"{_mask(is_causal)}, H={width}"}
            for name, ratio in compare(calls, batch, names).items():
                row[f"{name}, rate over dense segments"] = ratio * pairs
            whole = directions(functools.partial(dense, is_causal=is_causal), arrays)
            for name, ratio in compare(calls, whole, names).items():
                row[f"{name}, faster than dense"] = ratio
            if is_causal and not (REHEARSAL or ONCE):
                torch = run_torch(width)
                for name in names:
                    row[f"{name}, faster than torch"] = torch[name] / device_seconds(calls[name])[0]
            rows.append(row)
    return rows


def run_torch(width: int) -> dict[str, float]:
    """Returns the seconds of torch's branches, in a process of its own."""
    script = ROOT / "benchmarks" / "peers" / "torch_longnet.py"
    command = [sys.executable, str(script), *map(str, (LONG, HEADS, width, ROUNDS))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {name: statistics.median(times) for name, times in json.loads(done.stdout.splitlines()[-1]).items()}


def share_of_selection() -> Rows:
    """What selecting rows and merging branches costs: LongNet's time beyond that of its kernels on ready rows."""
    rows = []
    for width in WIDTHS:
        arrays = random(LONG, width)
        calls = directions(functools.partial(ours, pattern=LONGNET, is_causal=True), arrays)
        ready = [tuple(array[:, : LONG // rate].reshape(-1, KEPT, HEADS, width) for array in arrays) for rate in RATES]
        kernels = [directions(functools.partial(dense, is_causal=True), segments) for segments in ready]
        for name in ("forward", "gradient"):
            whole, *alone = device_seconds(calls[name], *(kernel[name] for kernel in kernels))
            rows.append({"case": f"{name}, H={width}", "share of the time": 1 - sum(alone) / whole})
    return rows


def emulated_ring() -> Rows:
    """A causal ring of 8 on one device, each shard's steps in turn: the sum of the block times over one device's."""
    rows: Rows = []
    length, shards, block = 65536 // SHRINK, 8, 8 if REHEARSAL else 65536
    (made,) = make_schedule(ringjax.DilatedPattern([ringjax.Segments(length)]), length, shards, HEADS, True, block)
    for width in WIDTHS:
        arrays = random(length, width)
        for name in (KERNEL, PALLAS):
            own = {"mosaic": "mosaic_gpu"}.get(name, name)
            implementation = IMPLEMENTATIONS[own]
            request = Request(arrays[0], arrays[1], arrays[2], "cuda")
            schedule = dataclasses.replace(implementation.serve(request, made)[0], implementation=own)
            rows_of = lambda array, shard, is_query, schedule=schedule, implementation=implementation: _computed_rows(
                array, schedule, shard, implementation, is_query
            )
            chunks = [tuple(rows_of(array, s, n == 0) for n, array in enumerate(arrays)) for s in range(shards)]
            steps = [_steps(schedule, shard, chunks, implementation) for shard in range(shards)]
            attend = functools.partial(ours, pattern=((length,), (1,)), is_causal=True, implementation=name)
            alone = directions(attend, arrays)["forward"]
            whole, *parts = device_seconds(alone, *steps)
            found, expected = (np.asarray(array, np.float64) for array in (steps[-1]()[0], rows_of(alone(), 7, True)))
            row = {"case": f"{name}, T={length}, H={width}", "block times over one device": sum(parts) / whole}
            rows.append({**row, "difference over spread": float((found - expected).std() / expected.std())})
    return rows


def _computed_rows(array: jax.Array, schedule: BranchSchedule, shard: int, implementation: Any, is_query: bool) -> Any:
    """The rows that a shard computes, from those of all tokens, which have no padding."""
    side = schedule.queries
    holder, row = schedule.origin(shard, np.arange(side.num_padded_rows), side)
    return implementation.lay_out(side, array[:, holder * side.num_padded_rows + row], 1 if is_query else None)


def _padded(schedule: BranchSchedule, holder: Any, num_heads: int, documents: Any = None) -> PaddedRows:
    heads = own_rows.BranchHeads(0, num_heads, np.zeros(1, np.uint32), (), np.zeros(1, np.int32))
    rows = own_rows.Rows(schedule, schedule.queries, jnp.int32(holder), heads)
    return PaddedRows(rows, jnp.int32(holder)[None], True, documents)


def _steps(schedule: BranchSchedule, shard: int, chunks: list[Arrays], implementation: Any) -> Call:
    padded = functools.partial(_padded, schedule, num_heads=chunks[0][1].shape[2])
    weighting = Weighting(chunks[0][0].shape[-1] ** -0.5)

    def attend(query: jax.Array, chunks: list[Arrays]) -> Any:
        partial = implementation.start(query, Keys(*chunks[0][1:3]))
        for hops in range(schedule.num_shards):
            source = schedule.source(shard, hops)
            of_keys = padded(source)._replace(rows=padded(source).rows.of_keys())
            sides = implementation.see(padded(shard)), implementation.see(of_keys)
            keys, step = Keys(*chunks[source][1:]), AttentionStep(schedule, *sides, hops=hops)
            partial = implementation.forward(query, keys, step, weighting, partial)
        return implementation.finish(partial)

    compiled = jax.jit(attend)
    return lambda: compiled(chunks[shard][0], chunks)


def ring_of_documents() -> Rows:
    """A causal ring of 8 with packed documents, each step of each shard alone: the ring waits for the busiest ones."""
    rows: Rows = []
    length, shards, width = 65536 // SHRINK, 8, WIDTHS[-1]
    arrays, rng = random(length, width), np.random.default_rng(0)
    for count in (16, 64):
        ends = np.sort(rng.choice(length - 1, min(count, length // 8) - 1, replace=False)) + 1
        documents = jnp.asarray(np.searchsorted(ends, np.arange(length), side="right"), jnp.int32)[None]
        row: dict[str, Any] = {"case": f"{count} documents, T={length}, H={width}"}
        seconds = {}
        for balance in ("stripes", "zigzag"):
            steps, difference = _steps_of_documents(arrays, documents, shards, balance)
            times = np.array(device_seconds(*itertools.chain(*steps))).reshape(shards, shards)  # [shards, hops]
            seconds[balance] = times.max(axis=0).sum()
            row[f"{balance}, time over the ideal"] = float(shards * seconds[balance] / times.sum())
            row[f"{balance}, difference over spread"] = difference
        rows.append({**row, "zigzag over stripes": float(seconds["zigzag"] / seconds["stripes"])})
    return rows


def _steps_of_documents(
    arrays: Arrays, documents: jax.Array, shards: int, balance: Any
) -> tuple[list[list[Call]], float]:
    """Returns the steps of each shard by hops, and how far their results are from those of one device."""
    own = {"mosaic": "mosaic_gpu"}.get(PALLAS, PALLAS)
    implementation, length = IMPLEMENTATIONS[own], documents.size
    pattern, block = ringjax.DilatedPattern([ringjax.Segments(length)]), 8 if REHEARSAL else 65536
    (made,) = make_schedule(pattern, length, shards, HEADS, True, block, balance=balance)
    request = Request(arrays[0], arrays[1], arrays[2], "cuda", needs=("document_ids",), balance=balance)
    schedule = dataclasses.replace(implementation.serve(request, made)[0], implementation=own)
    assert schedule.queries.is_full
    assert schedule.balance == balance
    rows_of = functools.partial(_computed_rows, schedule=schedule, implementation=implementation)
    ids = documents[:, :, None, None]
    of_shards = [
        (
            *(rows_of(array, shard=shard, is_query=number == 0) for number, array in enumerate(arrays)),
            per_row(rows_of(ids, shard=shard, is_query=False), implementation.rows_axis),
        )
        for shard in range(shards)
    ]

    attend = _attend_documents(schedule, implementation)

    def step(shard: int, hops: int) -> Call:
        source = schedule.source(shard, hops)
        (query, _, _, query_ids), (_, key, value, key_ids) = of_shards[shard], of_shards[source]
        given = jnp.int32(shard), jnp.int32(source), query, query_ids, key, value, key_ids
        return lambda: attend(*given)

    steps = [[step(shard, hops) for hops in range(shards)] for shard in range(shards)]
    whole = jax.jit(causal(PALLAS, {"pattern": pattern, "document_ids": documents}))(*arrays)
    outs, lses = zip(*(call() for call in steps[-1]), strict=True)
    pair = merge(outs, lses)[0], rows_of(whole, shard=shards - 1, is_query=True)
    found, expected = (np.asarray(one, np.float64) for one in pair)
    return steps, float((found - expected).std() / expected.std())


def _attend_documents(schedule: BranchSchedule, implementation: Any) -> Callable[..., Any]:
    """Returns the attention of one step, as one program for all shards and hops."""

    def attend(shard: Any, source: Any, query: jax.Array, query_ids: Any, key: Any, value: Any, key_ids: Any) -> Any:
        queries, keys = _padded(schedule, shard, HEADS, query_ids), _padded(schedule, source, HEADS, key_ids)
        sides = implementation.see(queries), implementation.see(keys._replace(rows=keys.rows.of_keys()))
        of_keys, step = Keys(key, value), AttentionStep(schedule, *sides, hops=jnp.int32(1))
        partial = implementation.start(query, of_keys)
        partial = implementation.forward(query, of_keys, step, Weighting(query.shape[-1] ** -0.5), partial)
        return implementation.finish(partial)[:2]

    return jax.jit(attend)


def errors() -> Rows:
    """Root mean square errors against float64, over those of cuDNN's dense attention."""
    rows, length = [], 2048 // SHRINK
    patterns = {
        "dense": {"segment_lengths": (length,), "dilation_rates": (1,)},
        "three branches": {"segment_lengths": (length // 8, length // 2, length), "dilation_rates": (1, 4, 8)},
    }
    for width in WIDTHS:
        for is_causal in (False, True):
            arrays = random(length, width, count=4, heads=2)
            plain = functools.partial(dense, is_causal=is_causal)
            own = _errors(plain, arrays, {**patterns["dense"], "is_causal": is_causal})
            for name, pattern in patterns.items():
                arguments = {**pattern, "is_causal": is_causal}
                attend = functools.partial(ringjax.ring_dilated_attention, implementation=KERNEL, **arguments)
                found = _errors(attend, arrays, arguments)
                ratios = {key: found[key] / own[key] for key in found}
                rows.append({"case": f"{name}, {_mask(is_causal)}, H={width}", **ratios})
    return rows


def _errors(function: Any, arrays: Arrays, arguments: dict[str, Any]) -> dict[str, float]:
    """The errors of the output and the gradients, each over the root mean square of what is right."""
    *inputs, cotangent = arrays

    def results(function: Any, inputs: Any, cotangent: Any) -> Any:
        out, pullback = jax.vjp(function, *inputs)
        return out, *pullback(cotangent)

    reference = functools.partial(ringjax.dilated_attention_reference, **arguments)
    found = jax.jit(functools.partial(results, function))(tuple(inputs), cotangent)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(array), jnp.float64) for array in arrays]
        exact = jax.jit(functools.partial(results, reference))(tuple(wide[:-1]), wide[-1])
        exact = [np.asarray(array) for array in exact]
    spread = lambda array: float(np.sqrt(np.mean(np.square(array))))
    return {
        name: spread(np.asarray(one, np.float64) - other) / spread(other)
        for name, one, other in zip(("out", "query", "key", "value"), found, exact, strict=True)
    }


def packed_documents() -> Rows:
    """16 packed documents, causal: the time over that of the same documents one by one through cuDNN."""
    rows: Rows = []
    for width in WIDTHS:
        arrays = random(PACKED, width)
        one_by_one = tuple(array.reshape(DOCUMENTS, -1, HEADS, width) for array in arrays)
        alone = directions(functools.partial(dense, is_causal=True), one_by_one)
        for name in (PALLAS, KERNEL):
            calls = directions(causal(name, packed()), arrays)
            ratios = compare(calls, alone, ("forward", "backward"))
            over = {f"{name}, over one by one": 1 / ratio for name, ratio in ratios.items()}
            rows.append({"case": f"{name}, T={PACKED}, H={width}", **over})
    return rows


def packed() -> dict[str, Any]:
    """Returns the arguments of packed documents."""
    documents = jnp.arange(PACKED)[None] // (PACKED // DOCUMENTS)
    return {"pattern": [ringjax.Segments(PACKED)], "document_ids": documents, "documents_are_sorted": True}


def chained_tiles() -> Rows:
    """Kernels in Pallas with two tiles, and up to four, for each block of threads: their time over that with one."""
    cases: dict[str, tuple[dict[str, Any], int]] = {
        "16 packed documents": (packed(), PACKED),
        "causal": ({"pattern": [ringjax.Segments(LENGTH)]}, LENGTH),
        "window of 1024": ({"pattern": [ringjax.Window(1024 // SHRINK)]}, PACKED),
    }
    rows: Rows = []
    for width in WIDTHS:
        for name, (arguments, length) in cases.items():
            one, *others = (_chain(links, arguments, random(length, width)) for links in (1, 2, 4))
            row: dict[str, Any] = {"case": f"{name}, T={length}, H={width}"}
            for links, calls in zip((2, 4), others, strict=True):
                ratios = compare(one, calls, ("forward", "backward"))
                row |= {f"{direction}, {links} tiles": ratio for direction, ratio in ratios.items()}
            rows.append(row)
    return rows


def _chain(links: int, arguments: dict[str, Any], arrays: Arrays) -> dict[str, Call]:
    """Returns calls that are compiled with so many tiles for a block of threads at most."""
    most, chains.MOST_LINKS = chains.MOST_LINKS, links
    calls = directions(causal(PALLAS, arguments), arrays)
    jax.block_until_ready([call() for call in calls.values()])
    chains.MOST_LINKS = most
    return calls


def windows() -> Rows:
    """A causal window of 1024: its rate over that of cuDNN's own window."""
    rows, size = [], 1024 // SHRINK
    for width in WIDTHS:
        arrays = random(PACKED, width)
        own = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, local_window_size=(size - 1, 0), implementation=KERNEL
        )
        theirs = directions(own, arrays)
        for name in (KERNEL, PALLAS):
            calls = directions(causal(name, {"pattern": [ringjax.Window(size)]}), arrays)
            ratios = compare(calls, theirs, ("forward", "backward"))
            over = {f"{name}, rate over cuDNN's": ratio for name, ratio in ratios.items()}
            rows.append({"case": f"{name}, T={PACKED}, H={width}", **over})
    return rows


def causal(implementation: Any, arguments: dict[str, Any]) -> Callable[..., Any]:
    """Returns causal attention by an implementation."""
    return functools.partial(ringjax.ring_dilated_attention, implementation=implementation, is_causal=True, **arguments)


def in_pallas(case: str) -> Rows:
    """The kernels in Pallas: their times, over XLA's, and beside cuDNN's where these serve."""
    arrays, arguments = random(LENGTH, WIDTHS[-1]), _arguments(case, LENGTH)
    calls = directions(causal(PALLAS, arguments), arrays)
    by_xla, names = directions(causal("xla", arguments), arrays), ("forward", "backward")
    row: dict[str, Any] = {"case": case, **{f"{name}, ms": 1e3 * device_seconds(calls[name])[0] for name in names}}
    row |= {f"{name}, time over XLA's": 1 / ratio for name, ratio in compare(calls, by_xla, names).items()}
    if case == "plain":
        beside = compare(calls, directions(functools.partial(dense, is_causal=True), arrays), names)
        row |= {f"{name}, rate over cuDNN's": ratio for name, ratio in beside.items()}
    return [row]


def errors_in_pallas(case: str) -> Rows:
    """The kernels in Pallas: their root mean square errors against float64, over those of XLA."""
    arguments = _arguments(case, LENGTH // 4)
    arrays = random(LENGTH // 4, WIDTHS[-1], count=4, heads=2)
    found, by_xla = (
        _errors(causal(name, arguments), arrays, {"is_causal": True, **arguments}) for name in (PALLAS, "xla")
    )
    return [{"case": case, **{name: found[name] / by_xla[name] for name in found}}]


def _arguments(case: str, length: int) -> dict[str, Any]:
    """What is asked of the kernels."""
    others: dict[str, dict[str, Any]] = {
        "plain": {},
        "documents": {"document_ids": np.arange(length)[None] // (600 // SHRINK)},
        "union": {"pattern": [ringjax.Segments(length // 4), ringjax.Segments(length, 4)], "merge": "union"},
        "soft cap": {"logits_soft_cap": 20.0},
        "dropout": {"dropout_rate": 0.1, "dropout_seed": 1},
    }
    return {"pattern": [ringjax.Segments(length)], **others[case]}


def longest() -> Rows:
    """The longest sequence of a power of two whose LongNet gradient runs: 16 heads of width 128."""
    width, length, found = WIDTHS[-1], 2**20 // SHRINK, 0
    while length <= 2**22 // SHRINK:
        segments = tuple(min(length, KEPT * rate * 4) for rate in RATES)
        function = functools.partial(ours, pattern=(segments, RATES), is_causal=True)
        gradient = jax.jit(jax.grad(lambda *arrays, f=function: f(*arrays).astype(jnp.float32).sum(), (0, 1, 2)))
        try:
            jax.block_until_ready(gradient(*random(length, width)))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            break
        found, length = length, length * 2
    return [{"case": f"H={width}", "longest sequence trained": found}]


# Kernels in Pallas may wait for themselves: all of this runs in processes of its own first.
MEASURES: dict[str, Callable[[], Rows]] = {
    measure.__name__: measure
    for measure in (
        errors,
        packed_documents,
        chained_tiles,
        windows,
        one_branch,
        longnet,
        emulated_ring,
        ring_of_documents,
        share_of_selection,
        longest,
    )
}
IN_PALLAS = {
    measure.__name__: {f"{measure.__name__}: {case}": functools.partial(measure, case) for case in CASES}
    for measure in (errors_in_pallas, in_pallas)
}


def answers(names: list[str], *flags: str) -> list[Rows]:
    """Returns what measures return in a process of its own, up to the first that fails, and why it does."""
    flags = (*flags, *(["--rehearse"] if REHEARSAL else []))
    command = [sys.executable, __file__, f"--measures={','.join(names)}", *flags]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        printed, reason = error.stdout or b"", f"no answer in {PATIENCE} s"
    except subprocess.CalledProcessError as error:
        printed, reason = error.stdout, (error.stderr.strip().splitlines() or ["ended"])[-1][:200]
        print(error.stderr[-3000:], file=sys.stderr)
    else:
        printed, reason = done.stdout, ""
    text = printed.decode() if isinstance(printed, bytes) else printed
    found = [json.loads(line) for line in text.splitlines() if line.startswith("[{")]
    return [*found, [{"outcome": reason}]] if reason else found


def try_all(names: list[str]) -> dict[str, Rows]:
    """Runs measures once, each in a process of its own, beside each other; returns what they return."""
    with ThreadPoolExecutor(PROCESSES) as pool:
        found = dict(zip(names, pool.map(lambda name: answers([name], "--once")[-1], names), strict=True))
    for name, rows in found.items():
        print(name, rows[-1].get("outcome", "ends"), flush=True)
    return found


def measure(name: str, tried: dict[str, Rows]) -> Rows:
    """Returns the rows of one measure, or of one for each case of what is in Pallas, given those of the first run."""
    cases = [one for one in tried if one.split(":")[0] == name]
    is_over = "errors" in name or (name in tried and "outcome" in tried[name][-1])
    if is_over:  # errors need no second run, and what did not end gets none
        return [row for case in cases for row in tried[case]]
    if name in IN_PALLAS:
        failed = [{"case": case, **tried[case][-1]} for case in cases if "outcome" in tried[case][-1]]
        ended = [case for case in cases if "outcome" not in tried[case][-1]]
        return [*(row for rows in (answers(ended) if ended else []) for row in rows), *failed]
    try:
        return MEASURES[name]()
    except Exception as error:  # the others are measured all the same
        traceback.print_exc()
        return [{"outcome": str(error).strip()[:200]}]


def about() -> dict[str, Any]:
    """Returns what the results depend on."""
    return {
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": version("jaxlib"), "numpy": np.__version__},
        "date": datetime.date.today().isoformat(),
    }


def write(name: str, what: dict[str, Any], rows: Rows) -> None:
    """Writes results to the folder that the command names, or to benchmarks/results."""
    folders = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("--")]
    folder = folders[0] if folders else ROOT / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"gpu_{name}.json").write_text(json.dumps({**what, "rows": rows}, indent=1) + "\n")


def main() -> None:
    """Runs everything, writes it, and prints the tables last; or measures what a process was asked for."""
    given = {name: value.split(",") for name, _, value in (argument.partition("=") for argument in sys.argv) if value}
    single = {name: function for group in (MEASURES, *IN_PALLAS.values()) for name, function in group.items()}
    if "--measures" in given:
        for name in given["--measures"]:
            print(json.dumps(single[name]()), flush=True)
        return
    names = given.get("--only", [*(name for name in MEASURES if name != "longest"), *IN_PALLAS, "longest"])
    begin, lines = time.perf_counter(), []
    # The longest sequence needs all memory.
    tried = try_all([name for name in single if name.split(":")[0] in names and name != "longest"])
    for name in names:
        print(name, f"after {time.perf_counter() - begin:.0f} s", flush=True)
        rows = measure(name, tried)
        jax.clear_caches()
        function = MEASURES.get(name) or next(iter(IN_PALLAS[name].values())).func
        claim = (function.__doc__ or "").splitlines()[0]
        lines += ["", claim, *table(rows)]
        print(*lines[-2 - len(rows) :], sep="\n", flush=True)
        if not REHEARSAL:
            write(name, {**about(), "claim": claim}, rows)
    print(", ".join(map(str, about().values())), *lines, sep="\n")


if __name__ == "__main__":
    main()
