"""One of several processes: attention and its gradients over all their devices, checked shard by shard."""

import sys

import jax
import numpy as np

coordinator, count, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 8 // count)
jax.config.update("jax_enable_x64", True)
jax.distributed.initialize(coordinator, count, index, heartbeat_timeout_seconds=20)

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_close, loss, random_arguments, random_documents, reference_results, with_gradients

import ringjax

# Rings inside of a process or across two, and rings through all.
PATTERN = {"segment_lengths": (24, 48), "dilation_rates": (2, 4), "is_causal": True}

mesh = ringjax.make_mesh((1, 8), ("data", "seq"))
assert jax.process_count() == count
assert len(jax.local_devices()) == 8 // count
sharding = NamedSharding(mesh, P("data", "seq"))
arrays = *random_arguments(48, (2, 1)), random_documents(48)
place = lambda array: jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])
results = jax.jit(with_gradients(loss(ringjax.ring_dilated_attention, mesh=mesh, **PATTERN)))(*map(place, arrays))
expected = reference_results(arrays, **PATTERN)
for number in range(len(jax.local_devices())):
    shards = [array.addressable_shards[number] for array in results]
    assert all(shard.data.shape[1] == 48 // 8 for shard in shards)
    own = [np.asarray(shard.data) for shard in shards]
    assert_close(own, [array[shard.index] for array, shard in zip(expected, shards, strict=True)])
print("exact")
