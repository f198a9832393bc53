"""Programs compiled for H100s and a TPU v5e: what they communicate and when, and the memory that they take.

Needs the plugins of jax for CUDA and TPU beside it, of its own version, but no such device; run with `-m aot`.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import loop_permutes
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax import ring_dilated_attention

pytestmark = pytest.mark.aot

TOKENS, HEADS, WIDTH = 8192, 4, 128  # tokens of one device, where eight share 65536
DENSE = (8 * TOKENS,), (1,)
PATTERN = (2048, 16384, 65536), (1, 4, 16)
# All of several permutes overlap: the compiler's own limit is one at a time.
OVERLAP = (("xla_gpu_experimental_parallel_collective_overlap_limit", 4),)
# The flags under which not all permutes overlap: the tests have to see the difference.
NOT_OVERLAPPING = {
    "h100": (("xla_gpu_enable_latency_hiding_scheduler", False),),
    "v5e": (("xla_enable_async_collective_permute", "false"),),
}
TOPOLOGIES = {"one node of H100s": ("h100", "1x1x8"), "four nodes of H100s": ("h100", "1x4x8"), "v5e": ("v5e", "2x4")}


@functools.cache
def devices(kind, topology):
    if kind == "v5e":
        return topologies.get_topology_desc(platform="tpu", topology_name=f"v5e:{topology}").devices
    target = (Path(__file__).parent / "h100.txtpb").read_text()
    return topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology=topology, target_config=target
    ).devices


@functools.cache
def compile_for(name, gradient, count=None, length=8 * TOKENS, pattern=DENSE, options=()):
    kind, topology = TOPOLOGIES[name]
    mesh = Mesh(np.array(devices(kind, topology)[:count]), ("seq",))
    shape = (1, length, HEADS, WIDTH)
    array = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "seq")))

    def attend(*arrays):
        return ring_dilated_attention(
            *arrays, segment_lengths=pattern[0], dilation_rates=pattern[1], is_causal=True, mesh=mesh
        )

    def total(*arrays):
        return attend(*arrays).astype(jnp.float32).sum()

    function = jax.grad(total, (0, 1, 2)) if gradient else attend
    options = dict(options or (OVERLAP if kind == "h100" else ()))
    with jax.enable_x64(False):  # as programs are by default
        return jax.jit(function).lower(array, array, array).compile(options)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_permute_in_a_loop_overlaps_with_computation(name, gradient):
    length = TOKENS * (32 if "four" in name else 8)
    text = compile_for(name, gradient, length=length, pattern=((length,), (1,))).as_text()
    permutes = loop_permutes(text)
    assert permutes
    assert all(permutes)
    for collective in ("all-gather", "all-to-all"):
        assert collective not in text


@pytest.mark.parametrize("name", ["one node of H100s", "v5e"])
def test_permutes_that_do_not_overlap_are_seen(name):
    permutes = loop_permutes(compile_for(name, True, options=NOT_OVERLAPPING[TOPOLOGIES[name][0]]).as_text())
    assert permutes
    assert not all(permutes)


def peak(length=8 * TOKENS, **arguments):
    """The most bytes on one device of a node, over those of its queries."""
    compiled = compile_for("one node of H100s", True, length=length, **arguments)
    devices = arguments.get("count", 8)
    return compiled.memory_analysis().peak_memory_in_bytes / (length // devices * HEADS * WIDTH * 2)


def test_memory_of_the_gradient():
    assert peak() <= 24
    assert peak(pattern=PATTERN) <= 18


def test_memory_shrinks_with_the_devices():
    # In bytes: a quarter of the tokens, and the gradient that is on its way while another is computed.
    assert peak() / 4 <= 0.28 * peak(count=2)
