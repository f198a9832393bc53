"""What 32 devices cost over 8, with the same tokens on each: compile time, program size, and error in bfloat16.

`python -m benchmarks.scaling`
"""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringjax
from benchmarks.timing import save, spread

TOKENS, HEADS, WIDTH = 64, 4, 16  # tokens of one device


# What the first segment is of the sequence: a ring on both numbers of devices, or local on 8 and a ring on 32.
FRACTIONS = {"rings on both": 2, "local on 8, a ring on 32": 8}


def make_mesh(devices: int) -> jax.sharding.Mesh:
    """Returns a mesh of so many devices along the sequence."""
    axis_types = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("seq",), axis_types=axis_types, devices=jax.devices()[:devices])


def compile_gradient(devices: int, fraction: int) -> tuple[float, int]:
    """Returns the seconds that the gradient takes to compile, and the lines of the program."""
    mesh, length = make_mesh(devices), devices * TOKENS

    def total(*arrays: jax.Array) -> Any:
        pattern: Any = {"segment_lengths": (length // fraction, length), "dilation_rates": (1, 4), "is_causal": True}
        out: Any = ringjax.ring_dilated_attention(*arrays, mesh=mesh, **pattern)
        return out.sum()

    arrays = [jax.ShapeDtypeStruct((1, length, HEADS, WIDTH), jnp.float32)] * 3
    jax.clear_caches()
    lowered = jax.jit(jax.grad(total, (0, 1, 2))).lower(*arrays)
    begin = time.perf_counter()
    compiled = lowered.compile()
    return time.perf_counter() - begin, str(compiled.as_text()).count("\n")


def error(devices: int) -> float:
    """Returns the root mean square error of bfloat16 against float64, of 2048 tokens on so many devices."""
    pattern = {"segment_lengths": (256, 2048), "dilation_rates": (1, 4), "is_causal": True}
    arrays = np.random.default_rng(0).normal(size=(3, 1, 2048, HEADS, WIDTH))
    arrays = jnp.asarray(arrays, jnp.bfloat16)
    out = jax.jit(lambda *arrays: ringjax.ring_dilated_attention(*arrays, mesh=make_mesh(devices), **pattern))(*arrays)
    exact = ringjax.dilated_attention_reference(*np.asarray(arrays, np.float64), **pattern)
    return float(np.sqrt(np.mean((np.asarray(out, np.float64) - np.asarray(exact)) ** 2)))


def main() -> None:
    """Measures all three, and writes the table."""
    jax.config.update("jax_num_cpu_devices", 32)
    jax.config.update("jax_enable_x64", True)
    rows = []
    for name, fraction in FRACTIONS.items():
        runs = {devices: [compile_gradient(devices, fraction) for _ in range(3)] for devices in (8, 32)}
        for index, what in enumerate(("compile time", "program size")):
            fewer, more = ([run[index] for run in runs[devices]] for devices in (8, 32))
            rows.append(
                {
                    "claim": f"{what}, 32 devices over 8: {name}",
                    "ratio": statistics.median(more) / statistics.median(fewer),
                    "spread": max(spread(fewer), spread(more)),
                }
            )
    rows.append({"claim": "error in bfloat16, 32 devices over 1", "ratio": error(32) / error(1), "spread": 0.0})
    save("scaling", rows)


if __name__ == "__main__":
    main()
