"""Where the time of attention goes on one NVIDIA GPU: in the kernel of attention, or in passes around it.

`python benchmarks/gpu_profile.py [FOLDER]` writes `gpu_profile.json` to benchmarks/results or to FOLDER.
"""

import collections
import functools
import gzip
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
# The profiler sees the kernels of no command buffer.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax

import ringjax
from benchmarks.on_gpu import (
    KERNEL,
    LENGTH,
    LONG,
    LONGNET,
    PACKED,
    PALLAS,
    REHEARSAL,
    SHRINK,
    WIDTHS,
    Call,
    about,
    causal,
    device_seconds,
    directions,
    ours,
    packed,
    random,
    write,
)
from benchmarks.timing import table

TIMES = 3
OF_ATTENTION = r"^ringjax_|_sdpa_.*_[fb]prop_"


def cases() -> dict[str, tuple[Any, int]]:
    """Returns functions of queries, keys and values, and the tokens of each."""
    patterns = {
        "causal": ({"pattern": [ringjax.Segments(LENGTH)]}, LENGTH),
        "16 packed documents": (packed(), PACKED),
        "window of 1024": ({"pattern": [ringjax.Window(1024 // SHRINK)]}, PACKED),
    }
    found: dict[str, tuple[Any, int]] = {}
    for implementation in (PALLAS, KERNEL):
        for name, (arguments, length) in patterns.items():
            found[f"{name}, {implementation}"] = causal(implementation, arguments), length
        longnet = functools.partial(ours, pattern=LONGNET, is_causal=True, implementation=implementation)
        found[f"LongNet, {implementation}"] = longnet, LONG
    found["causal, xla"] = causal("xla", patterns["causal"][0]), LENGTH
    return found


def profile(call: Call) -> dict[str, float]:
    """Returns the microseconds of each kernel of a call."""
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            jax.block_until_ready([call() for _ in range(TIMES)])
        (path,) = Path(folder).rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("ph") == "M"]
    devices = {event["pid"] for event in named if "GPU" in str(event["args"].get("name"))}
    streams = {(event["pid"], event["tid"]) for event in named if "Stream" in str(event["args"].get("name"))}
    times: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.get("pid") in devices and (event["pid"], event.get("tid")) in streams and "dur" in event:
            times[event["name"]] += event["dur"] / TIMES
    return dict(times.most_common())


def main() -> None:
    """Profiles all, forward and backward."""
    rows = []
    for name, (function, length) in cases().items():
        calls = directions(function, random(length, WIDTHS[-1]))
        for direction in ("forward", "backward"):
            kernels = profile(calls[direction])
            of_attention = sum(time for kernel, time in kernels.items() if re.search(OF_ATTENTION, kernel))
            milliseconds = 1e3 * device_seconds(calls[direction])[0]
            row = {"case": f"{name}, {direction}, T={length}, H={WIDTHS[-1]}", "ms": milliseconds}
            rows.append({**row, "ms in attention's kernels": of_attention / 1e3})
            print(rows[-1], *list(kernels.items())[:8], sep="\n    ", flush=True)
        jax.clear_caches()
    print(*table(rows), sep="\n")
    if not REHEARSAL:
        write("profile", {**about(), "claim": "The time in kernels of attention, and in all of a call."}, rows)


if __name__ == "__main__":
    main()
