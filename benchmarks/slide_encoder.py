"""The processor time of Prov-GigaPath's slide encoder, beside the same model in torch, and on eight simulated devices.

`python -m benchmarks.slide_encoder`; the smallest of some rounds of each, in processes of their own.
"""

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType

from benchmarks.environment import ROOT, run_module, run_peer
from benchmarks.timing import save

sys.path.insert(0, str(ROOT / "examples"))

ROUNDS = 2
TILES = 10_000


def measure(tiles: int, devices: int, strategy: str) -> float:
    """Returns the processor seconds of one slide, of its best round."""
    from parts.distribution import on_all_devices  # noqa: PLC0415  # of the examples
    from parts.slide_encoder import SlideEncoder  # noqa: PLC0415  # of the examples
    from parts.slides import synthetic_slide  # noqa: PLC0415

    mesh = jax.make_mesh((devices,), ("seq",), axis_types=(AxisType.Auto,)) if devices > 1 else None
    encoder = on_all_devices(SlideEncoder(mesh=mesh, strategy=strategy, rngs=nnx.Rngs(0)), mesh)
    encode = nnx.jit(lambda encoder, *slide: encoder(*slide), graph_updates=False)
    slide, seconds = [jnp.asarray(array)[None] for array in synthetic_slide(tiles, 1536)], []
    jax.block_until_ready(encode(encoder, *slide))
    for _ in range(ROUNDS):
        begin = time.process_time()
        jax.block_until_ready(encode(encoder, *slide))
        seconds.append(time.process_time() - begin)
    return min(seconds)


def seconds_of(tiles: int, devices: int = 1, strategy: str = "ring") -> float:
    """Returns what `measure` does, of a process of its own."""
    variables = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    return run_module("benchmarks.slide_encoder", str(tiles), str(devices), strategy, variables=variables)


def main() -> None:
    """Measures everything, or what a process was asked for."""
    if sys.argv[1:]:
        tiles, devices, strategy = sys.argv[1:]
        print(json.dumps(measure(int(tiles), int(devices), strategy)))
        return
    own = {tiles: seconds_of(tiles) for tiles in (1068, TILES)}
    ratios = [
        (f"on eight devices, {way}", n, seconds_of(n, 8, way) / own[n]) for n in own for way in ("ring", "all_to_all")
    ]
    for kind, name in (("dense", "torch, dense attention"), ("branches", "torch, its fused attention on each branch")):
        ratios.append((name, TILES, min(run_peer("torch_slide_encoder.py", TILES, kind, ROUNDS)) / own[TILES]))
    column = "processor time over that of one device"
    rows = [{"program": name, "tiles": f"{tiles:,}", column: ratio} for name, tiles, ratio in ratios]
    save("slide_encoder", rows)


if __name__ == "__main__":
    assert os.environ.get("JAX_PLATFORMS", "cpu") == "cpu", "processor time is that of CPUs"
    main()
