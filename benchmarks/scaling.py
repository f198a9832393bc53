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
from benchmarks.timing import save

TOKENS, HEADS, WIDTH = 64, 4, 16  # tokens of one device


def attention(devices: int) -> tuple[Any, int]:
    """Returns attention on so many devices with a pattern that grows with the sequence, and the sequence's length."""
    mesh = jax.make_mesh(
        (devices,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )
    length = devices * TOKENS
    call = lambda *arrays, mesh=mesh, length=length: ringjax.ring_dilated_attention(
        *arrays, segment_lengths=(length // 2, length), dilation_rates=(1, 4), is_causal=True, mesh=mesh
    )
    return call, length


def compile_gradient(devices: int) -> tuple[float, int]:
    """Returns the seconds that the gradient takes to compile, and the lines of the program."""
    call, length = attention(devices)
    arrays = [jax.ShapeDtypeStruct((1, length, HEADS, WIDTH), jnp.float32)] * 3
    jax.clear_caches()
    lowered = jax.jit(jax.grad(lambda *arrays: call(*arrays).sum(), (0, 1, 2))).lower(*arrays)
    begin = time.perf_counter()
    compiled = lowered.compile()
    return time.perf_counter() - begin, str(compiled.as_text()).count("\n")


def error(devices: int) -> float:
    """Returns the root mean square error of bfloat16 against float64, of 2048 tokens on so many devices."""
    mesh = jax.make_mesh(
        (devices,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )
    pattern = {"segment_lengths": (256, 2048), "dilation_rates": (1, 4), "is_causal": True}
    arrays = np.random.default_rng(0).normal(size=(3, 1, 2048, HEADS, WIDTH))
    arrays = jnp.asarray(arrays, jnp.bfloat16)
    out = jax.jit(lambda *arrays: ringjax.ring_dilated_attention(*arrays, mesh=mesh, **pattern))(*arrays)
    exact = ringjax.dilated_attention_reference(*np.asarray(arrays, np.float64), **pattern)
    return float(np.sqrt(np.mean((np.asarray(out, np.float64) - np.asarray(exact)) ** 2)))


def main() -> None:
    """Measures all three, and writes the table."""
    jax.config.update("jax_num_cpu_devices", 32)
    jax.config.update("jax_enable_x64", True)
    compiled = {devices: [compile_gradient(devices) for _ in range(3)] for devices in (8, 32)}
    seconds, lines = ({d: statistics.median(run[i] for run in runs) for d, runs in compiled.items()} for i in (0, 1))
    errors = {devices: error(devices) for devices in (1, 32)}
    save(
        "scaling",
        [
            {"claim": "compile time, 32 devices over 8", "ratio": seconds[32] / seconds[8]},
            {"claim": "program size, 32 devices over 8", "ratio": lines[32] / lines[8]},
            {"claim": "error in bfloat16, 32 devices over 1", "ratio": errors[32] / errors[1]},
        ],
    )


if __name__ == "__main__":
    main()
