"""The causal ring over eight simulated devices against one device, and against others on the same devices.

The others are `ringattention`, `jax.nn.dot_product_attention` as XLA partitions it, and, on one device, torch.

`python -m benchmarks.ring_speed`; each side runs in processes of its own, which take turns.
"""

import collections
import functools
import json
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringjax
from benchmarks.environment import run_module, run_peer
from benchmarks.timing import HEADS, WIDTH, save, spread, time_in_turns

LENGTH, ROUNDS, TURNS, CHUNKS = 8192, 3, 3, (512, 1024)


def measure(devices: int, is_of_jax: bool = False) -> None:
    """Times causal attention on so many simulated devices, ours or jax's, and prints the seconds as JSON."""
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = jax.make_mesh((devices,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,)) if devices > 1 else None
    arrays = [jnp.asarray(a, jnp.float32) for a in np.random.default_rng(0).normal(size=(3, 1, LENGTH, HEADS, WIDTH))]
    if mesh is not None:
        arrays = jax.device_put(arrays, jax.NamedSharding(mesh, jax.P(None, "seq")))
    attend: Any = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    if not is_of_jax:
        pattern = {"segment_lengths": (LENGTH,), "dilation_rates": (1,), "is_causal": True}
        attend = functools.partial(ringjax.ring_dilated_attention, **pattern, mesh=mesh)
    forward, gradient = jax.jit(attend), jax.jit(jax.grad(lambda *arrays: attend(*arrays).sum(), (0, 1, 2)))
    calls = {"forward": lambda: forward(*arrays), "gradient": lambda: gradient(*arrays)}
    print(json.dumps(time_in_turns(calls, ROUNDS)))


def main() -> None:
    """Measures all sides in turns, and writes the table of the others' times over ours."""
    sides = {
        "one device": lambda: run_module("benchmarks.ring_speed", "1"),
        "ring of 8": lambda: run_module("benchmarks.ring_speed", "8"),
        "dot_product_attention of jax": lambda: run_module("benchmarks.ring_speed", "8", "jax"),
        "torch": lambda: run_peer("torch_attention.py", LENGTH, ROUNDS),
    }
    for chunk in CHUNKS:
        sides[f"ringattention, chunks of {chunk}"] = lambda chunk=chunk: run_peer(
            "ringattention_ring.py", LENGTH, chunk, ROUNDS
        )
    seconds: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for _ in range(TURNS):
        for side, run in sides.items():
            for direction, values in run().items():
                seconds[side, direction] += values

    rows = []
    for direction in ("forward", "gradient"):
        peer = min((side for side in sides if "ringattention" in side), key=lambda side: min(seconds[side, direction]))
        claims = {
            "ring over one device": ("one device", "ring of 8"),
            "ring over ringattention": (peer, "ring of 8"),
            "ring over dot_product_attention": ("dot_product_attention of jax", "ring of 8"),
            "one device over torch": ("torch", "one device"),
        }
        for claim, (other, ours) in claims.items():
            theirs, own = seconds[other, direction], seconds[ours, direction]
            rows.append(
                {
                    "claim": claim,
                    "direction": direction,
                    "ratio of rates": min(theirs) / min(own),
                    "ratio of medians": statistics.median(theirs) / statistics.median(own),
                    "spread of ours": spread(own),
                    "spread of theirs": spread(theirs),
                    "theirs": other,
                }
            )
    save("ring_speed", rows)


if __name__ == "__main__":
    measure(int(sys.argv[1]), is_of_jax=len(sys.argv) > 2) if len(sys.argv) > 1 else main()
