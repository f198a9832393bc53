"""What eight-device programs compile to: the hops of the schedule, the kept rows alone, memory that shrinks."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from compiled import has_dimension, permutes
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import make_mesh, use_small_blocks

from ringjax import DilatedPattern, ring_dilated_attention
from ringjax._mesh import Placement
from ringjax._ring import Plan
from ringjax._rows import make_mask
from ringjax._schedule import make_schedule

HEADS, WIDTH = 2, 6
FLOAT = 4


def compile_attention(mesh, length, spec=("seq",), heads=(HEADS, HEADS), batch=1, gradient=False, **arguments):
    shape = lambda heads: jax.ShapeDtypeStruct(
        (batch, length, heads, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(None, *spec))
    )

    def call(query, key, value):
        out = ring_dilated_attention(query, key, value, mesh=mesh, **arguments)
        # The result is kept where its tokens are: what is read off the program is the attention's alone.
        return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, P(None, *spec)))

    function = call
    if gradient:
        function = lambda *arrays: jax.vjp(call, *arrays)[1](arrays[0])
    return jax.jit(function).lower(*map(shape, (heads[0], heads[1], heads[1]))).compile()


@pytest.mark.parametrize(
    ("segment_length", "rate", "length"), [(512, 1, 512), (128, 2, 512), (192, 1, 512), (96, 3, 384), (40, 2, 256)]
)
def test_permutes_are_the_hops_of_the_schedule(segment_length, rate, length):
    arguments = {"segment_lengths": (segment_length,), "dilation_rates": (rate,), "is_causal": True}
    (branch,) = make_schedule(DilatedPattern((segment_length,), (rate,)), length, 8, HEADS)
    rows = branch.num_tiles * branch.chunks_per_tile * branch.block_rows
    row_bytes = rows * HEADS * WIDTH * FLOAT
    assert branch.ring_size > 1

    mesh = make_mesh(seq=8)
    forward = permutes(compile_attention(mesh, length, **arguments).as_text())
    assert sum(permute.count * permute.bytes for permute in forward) == (branch.ring_size - 1) * 2 * row_bytes
    assert sum(permute.count for permute in forward) in ((branch.ring_size - 1), 2 * (branch.ring_size - 1))

    both = permutes(compile_attention(mesh, length, gradient=True, **arguments).as_text())
    # The queries travel, being lighter: with the output's cotangent, the lse, delta and the gradient.
    backward = (branch.ring_size - 1) * (3 * row_bytes + 2 * rows * HEADS * FLOAT)
    assert sum(permute.count * permute.bytes for permute in both) == (branch.ring_size - 1) * 2 * row_bytes + backward
    for permute in (*forward, *both):
        for source, destination in permute.pairs:
            assert branch.ring(source)[0] == branch.ring(destination)[0]


def test_few_key_value_heads_travel_instead_of_many_query_heads():
    arguments = {"segment_lengths": (512,), "dilation_rates": (1,)}
    both = permutes(compile_attention(make_mesh(seq=8), 512, heads=(8, 1), gradient=True, **arguments).as_text())
    row_bytes = 64 * WIDTH * FLOAT
    assert sum(permute.count * permute.bytes for permute in both) == 7 * 2 * row_bytes + 7 * 4 * row_bytes


def test_segments_within_a_device_need_no_permute():
    arguments = {"segment_lengths": (64, 32), "dilation_rates": (1, 4), "is_causal": True}
    assert permutes(compile_attention(make_mesh(seq=8), 512, gradient=True, **arguments).as_text()) == []


@pytest.mark.parametrize("gradient", [False, True])
def test_nothing_of_the_whole_length_is_on_a_device(gradient):
    length = 8 * 101
    arguments = {"segment_lengths": (101, 202, 1000), "dilation_rates": (1, 2, 4), "is_causal": True}
    text = compile_attention(make_mesh(seq=8), length, gradient=gradient, **arguments).as_text()
    for collective in ("all-gather", "all-to-all", "all-reduce"):
        assert collective not in text
    assert has_dimension(text, 101)
    assert not has_dimension(text, length)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_tensor_axis_adds_no_collective(kind):
    mesh = make_mesh(kind, seq=2, tensor=2)
    arguments = {"segment_lengths": (32, 64), "dilation_rates": (4, 8), "is_causal": True}
    shape = jax.ShapeDtypeStruct(
        (1, 128, 4, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(None, "seq", "tensor"))
    )
    call = lambda *arrays: ring_dilated_attention(*arrays, mesh=mesh, **arguments)
    gradient = jax.jit(lambda *arrays: jax.vjp(call, *arrays)[1](arrays[0]))
    text = gradient.lower(shape, shape, shape).compile().as_text()
    for collective in ("all-gather", "all-to-all", "all-reduce", "collective-permute"):
        assert f"{collective}(" not in text


@pytest.mark.parametrize("gradient", [False, True])
def test_bytes_on_a_device_halve_when_the_devices_double(gradient, monkeypatch):
    use_small_blocks(monkeypatch, rows=16)  # what is read is the rows, not the logits of one block
    arguments = {"segment_lengths": (512, 8192), "dilation_rates": (1, 4), "is_causal": True}
    used = []
    for count in (2, 4, 8):
        memory = compile_attention(make_mesh(seq=count), 8192, gradient=gradient, **arguments).memory_analysis()
        used.append(memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.argument_size_in_bytes)
    for more, fewer in itertools.pairwise(used):
        assert fewer <= 0.55 * more


def test_memory_of_one_device_is_linear_in_the_tokens(monkeypatch):
    use_small_blocks(monkeypatch, rows=64)
    used = []
    for length in (4096, 8192, 16384):
        arguments = {"segment_lengths": (length,), "dilation_rates": (1,)}
        memory = compile_attention(make_mesh(seq=1), length, gradient=True, **arguments).memory_analysis()
        used.append(memory.temp_size_in_bytes)
    for fewer, more in itertools.pairwise(used):
        assert more <= 2.1 * fewer


def test_no_array_of_logits_exceeds_a_block():
    length = 2048
    arguments = {"segment_lengths": (length,), "dilation_rates": (1,)}
    memory = compile_attention(make_mesh(seq=1), length, gradient=True, **arguments).memory_analysis()
    assert memory.temp_size_in_bytes < HEADS * length * length * FLOAT


def test_masked_blocks_are_skipped():
    pattern = DilatedPattern((4096,), (1,))
    counts = {}
    for is_causal in (False, True):
        branches = make_schedule(pattern, 4096, 1, 1)
        rows = Plan(pattern, branches, 1, is_causal, 1.0, Placement()).rows(branches[0])
        visits = make_mask(rows, rows, is_causal, True).visits
        counts[is_causal] = int((visits.stop - visits.start).sum()), int(visits.is_whole.sum())
    assert counts[False] == (64, 64)
    assert counts[True] == (36, 28)
