"""What one token costs over a cache of 65,536 keys on eight simulated devices, beside a plain softmax over it.

`python -m benchmarks.decoding`
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax
from benchmarks.timing import HEADS, WIDTH, save, spread, time_in_turns
from ringjax import Segments, Window

ROWS = 65536
PATTERNS = {
    "dense": [Segments(ROWS)],
    "window of 64": [Window(64)],
    "segments of 64": [Segments(64)],
    "window of 64 and every fourth of 512": [Window(64), Segments(512, rate=4)],
}


def plain(query: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns dense attention on the first rows, as XLA partitions it."""
    logits = jnp.einsum("bcnh,bsnh->bncs", query, keys) / np.sqrt(WIDTH)
    is_key = jnp.arange(ROWS) < lengths[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(is_key, logits, -jnp.inf), axis=-1)
    return jnp.einsum("bncs,bsnv->bcnv", weights, values)


def main() -> None:
    """Measures each pattern in rounds of its own with the plain softmax, and saves the ratios of the best times."""
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((8,), ("seq",), axis_types=(AxisType.Auto,))
    draw = lambda seed, rows: jax.random.normal(jax.random.key(seed), (1, rows, HEADS, WIDTH), jnp.float32)
    specs = P(), P(None, "seq"), P(None, "seq"), P()
    arrays = [draw(0, 1), draw(1, ROWS), draw(2, ROWS), jnp.full(1, ROWS, jnp.int32)]
    arrays = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]
    dense = jax.jit(plain)
    rows = []
    for name, pattern in PATTERNS.items():
        decode = functools.partial(ringjax.decode_attention, pattern=pattern, mesh=mesh)
        ours = jax.jit(lambda *given, decode=decode: decode(*given[:3], lengths=given[3]))
        found = {}
        for side, call in (("plain", dense), ("ours", ours)):  # not in turns: a small call after a large one waits
            found |= time_in_turns({side: lambda call=call: call(*arrays)}, rounds=30)
        row = {"pattern": name, "time over that of a plain softmax": min(found["ours"]) / min(found["plain"])}
        rows.append(row | {"spread of times": spread(found["ours"])})
    save("decoding", rows)


if __name__ == "__main__":
    main()
