"""Times `ringattention` on eight simulated devices; prints the seconds of each round as JSON.

`python ringattention_ring.py LENGTH CHUNK ROUNDS`, in an environment of its own.
"""

import functools
import importlib
import json
import sys
import time
import types
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# The package no longer imports; its module does, below an empty package of that name.
package = types.ModuleType("ringattention")
package.__path__ = [str(Path(find_spec("ringattention").origin).parent)]
sys.modules["ringattention"] = package
ring_attention = importlib.import_module("ringattention.ringattention_jax").ring_attention

length, chunk, rounds = map(int, sys.argv[1:])
mesh = jax.make_mesh((8,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
options = {
    "causal_block_size": 1,
    "query_chunk_size": chunk,
    "key_chunk_size": chunk,
    "deterministic": True,
    "dropout_rng": None,
    "attn_pdrop": 0.0,
    "dtype": jnp.float32,
    "policy": jax.checkpoint_policies.nothing_saveable,
    "precision": None,
    "prevent_cse": False,
}


@functools.partial(jax.shard_map, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"), check_vma=False)
def attend(query, key, value):
    """Computes causal attention of shards [1, T / 8, 8, 64]."""
    return ring_attention(query, key, value, None, None, None, "seq", True, options)


shape = (1, length, 8, 64)
arrays = [
    jax.device_put(array.astype(np.float32), NamedSharding(mesh, P(None, "seq")))
    for array in np.random.default_rng(0).normal(size=(3, *shape))
]
calls = {
    "forward": jax.jit(attend),
    "gradient": jax.jit(jax.grad(lambda *arrays: attend(*arrays).sum(), (0, 1, 2))),
}
seconds = {name: [] for name in calls}
for call in calls.values():
    jax.block_until_ready(call(*arrays))
for _ in range(rounds):
    for name, call in calls.items():
        begin = time.perf_counter()
        jax.block_until_ready(call(*arrays))
        seconds[name].append(time.perf_counter() - begin)
print(json.dumps(seconds))
