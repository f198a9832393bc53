"""A sequence over two mesh axes: the same numbers, and few messages between the devices of the outer one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import (
    assert_close,
    loss,
    make_mesh,
    random_arguments,
    random_documents,
    reference_results,
    ring_results,
    with_gradients,
)

import ringjax
from ringjax import DilatedPattern, Segments, Window, plan, ring_dilated_attention
from ringjax._schedule.make import make_schedule
from ringjax._tools.command import main
from ringjax._tools.hlo import bytes_sent, permutes

AXES = ("dcn", "ici")
DENSE = {"pattern": [Segments(64)], "is_causal": True}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
CASES = {
    "causal": ((2, 4), AUTO, (2, 1), DENSE),
    "four times two": ((4, 2), EXPLICIT, (2, 1), DENSE),
    "keys travel back": ((2, 2), AUTO, (6, 1), {**DENSE, "is_causal": False}),
    "dealt documents": ((2, 3), AUTO, (4, 2), {**DENSE, "document_ids": True, "balance": "stripes"}),
    "rings of all sizes": (
        (2, 4),
        EXPLICIT,
        (4, 2),
        {"pattern": [Segments(8), Segments(32, 2), Segments(64, 4), Window(9)], "is_causal": True},
    ),
    "an exchange in groups": ((2, 4), AUTO, (4, 2), {**DENSE, "strategy": "all_to_all"}),
    "gathered": ((2, 4), AUTO, (4, 2), {**DENSE, "strategy": "all_gather"}),
    "a length that nothing divides": ((2, 4), EXPLICIT, (2, 1), {"pattern": [Segments(20), Segments(67)]}),
}


IN_THE_OTHER_ORDER = ("four times two", "rings of all sizes")


@pytest.mark.quick("causal", "four times two", "dealt documents")
@pytest.mark.parametrize("name", CASES)
def test_two_axes_equal_the_oracle(name):
    """The names say which axis is the outer one, not the mesh."""
    sizes, kind, heads, options = CASES[name]
    sizes = dict(zip(AXES, sizes, strict=True))
    mesh = make_mesh(kind, **dict(reversed(sizes.items())) if name in IN_THE_OTHER_ORDER else sizes)
    length = 67 if name == "a length that nothing divides" else 64
    options, arrays = dict(options), random_arguments(length, heads)
    documents = [random_documents(length)] if options.pop("document_ids", False) else []
    expected = {name: options[name] for name in ("pattern", "is_causal") if name in options}
    actual = ring_results([*arrays, *documents], mesh=mesh, axis_name=AXES, **options)
    assert_close(actual, reference_results([*arrays, *documents], **expected))


@pytest.mark.slow
@pytest.mark.parametrize(("length", "heads"), [(8, (4, 2)), (26, (2, 2))], ids=["gathered", "around"])
def test_few_queries_over_two_axes_equal_the_oracle(length, heads):
    arrays = random_arguments(length, heads, key_length=128)
    options = {"pattern": [Segments(256)], "is_causal": True, "query_offset": 60}
    actual = ring_results(arrays, mesh=make_mesh(dcn=4, ici=2), axis_name=AXES, **options)
    assert_close(actual, reference_results(arrays, **options))


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_the_callers_shard_map(check_vma):
    mesh, arrays = make_mesh(dcn=2, ici=2), random_arguments(64, (2, 1))
    mapped = jax.shard_map(
        lambda *shards: ring_dilated_attention(*shards, return_residual=True, axis_name=AXES, **DENSE),
        mesh=mesh,
        in_specs=P(None, AXES),
        out_specs=P(None, AXES),
        check_vma=check_vma,
    )
    results = jax.jit(with_gradients(loss(lambda *shards, return_residual: mapped(*shards))))(*arrays)
    assert_close(jax.device_get(results), reference_results(arrays, **DENSE))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_under_vmap_and_checkpoint(kind):
    mesh, arrays = make_mesh(kind, dcn=4, ici=2), random_arguments(64, (2, 1), batch=(2, 1))
    call = functools.partial(ring_dilated_attention, return_residual=True, mesh=mesh, axis_name=AXES, **DENSE)
    nested = loss(lambda *arrays, return_residual: jax.checkpoint(jax.vmap(jax.checkpoint(call)))(*arrays))
    assert_close(jax.device_get(jax.jit(with_gradients(nested))(*arrays)), reference_results(arrays, **DENSE))


def test_axes_of_several_types_are_refused():
    mesh = jax.make_mesh((2, 2), AXES, axis_types=(AUTO, EXPLICIT), devices=jax.devices()[:4])
    array = jnp.ones((1, 64, 2, 4))
    with pytest.raises(ValueError, match=r"axis_name=\('dcn', 'ici'\) are of several types, Auto, Explicit: make the"):
        ring_dilated_attention(array, array, array, mesh=mesh, axis_name=AXES, **DENSE)


def test_a_shard_map_over_one_of_two_axes_is_refused():
    attend = functools.partial(ring_dilated_attention, axis_name=AXES, **DENSE)
    mapped = jax.shard_map(
        attend, mesh=make_mesh(dcn=2, ici=2), in_specs=P(None, "ici"), out_specs=P(None, "ici"), axis_names={"ici"}
    )
    array = jnp.ones((1, 64, 2, 4))
    with pytest.raises(ValueError, match=r"maps over \('ici',\) of axis_name=\('dcn', 'ici'\): map over all of these"):
        jax.jit(mapped)(array, array, array)


def test_names_that_the_mesh_lacks_are_refused():
    array = jnp.ones((1, 64, 2, 4))
    attend = functools.partial(ring_dilated_attention, array, array, array, axis_name=AXES, **DENSE)
    with pytest.raises(ValueError, match=r"of axis_name=\('dcn', 'ici'\) the mesh has \('ici',\) alone"):
        attend(mesh=make_mesh(ici=4))
    with jax.set_mesh(make_mesh(ici=4)), pytest.raises(ValueError, match=r"the mesh has \('ici',\) alone"):
        attend()
    with pytest.raises(ValueError, match=r"has no axis axis_name=\('dcn', 'ici'\): name one of \('seq',\)"):
        attend(mesh=make_mesh(seq=4))
    with pytest.raises(ValueError, match=r"mesh=\{'ici': 4\} has no axis 'dcn' of axis_name=\('dcn', 'ici'\)"):
        plan([Segments(64)], num_tokens=64, num_heads=2, mesh={"ici": 4}, axis_name=AXES)
    with pytest.raises(TypeError, match="mesh=8 must be a mesh, or the size of each axis by its name$"):
        plan([Segments(64)], num_tokens=64, num_heads=2, axis_name=AXES)


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1)], ids=str)
def test_an_axis_of_one_device(sizes):
    """XLA leaves it out of the sharding of its results."""
    mesh = make_mesh(**dict(zip(AXES, sizes, strict=True)))
    query, key, value = random_arguments(64, (2, 1))
    tokens, _ = ringjax.pad_to_mesh(jnp.asarray(query), axis=-3, mesh=mesh, axis_name=AXES)
    attend = functools.partial(ring_dilated_attention, mesh=mesh, axis_name=AXES, **DENSE)
    out, *_ = reference_results((query, key, value), **DENSE)
    np.testing.assert_allclose(attend(tokens, jnp.asarray(key), jnp.asarray(value)), out, atol=1e-12)


def held_after(schedule, hops):
    """What each shard holds after so many hops of a nested ring, as the permutes move it."""
    held = np.arange(schedule.num_shards)

    def move(pairs):
        moved = np.full_like(held, -1)
        for source, destination in pairs:
            moved[destination] = held[source]
        return moved

    for _ in range(hops // schedule.inner_size):
        held = move(schedule.crossing(1))
    for _ in range(hops % schedule.inner_size):
        held = move(schedule.permutation(1))
    return held


@pytest.mark.parametrize(("outer", "inner", "rings"), [(2, 4, 1), (4, 2, 1), (3, 5, 1), (2, 2, 3)])
def test_permutes_bring_what_the_schedule_says(outer, inner, rings):
    num_shards = outer * inner * rings
    pattern = DilatedPattern([Segments(16 * outer * inner)])
    (schedule,) = make_schedule(pattern, 16 * num_shards, num_shards, 1, num_inner_devices=inner)
    assert (schedule.outer_size, schedule.inner_size, schedule.ring_size) == (outer, inner, outer * inner)
    shards = np.arange(num_shards)
    for hops in range(outer * inner):
        held = held_after(schedule, hops)
        np.testing.assert_array_equal(schedule.source(shards, hops), held)
        np.testing.assert_array_equal(schedule.source(jnp.asarray(shards, jnp.uint32), jnp.uint32(hops)), held)
    come = {tuple(sorted(int(schedule.source(shard, hops)) for hops in range(outer * inner))) for shard in shards}
    assert come == {tuple(range(first, first + outer * inner)) for first in range(0, num_shards, outer * inner)}


@pytest.mark.parametrize(
    ("segment", "num_inner", "outer_size"),
    [(1024, 4, 2), (512, 4, 1), (256, 4, 1), (1024, 8, 1), (1024, 1, 1), (1024, 3, 1)],
)
def test_rings_within_the_inner_axis_are_flat(segment, num_inner, outer_size):
    (one,) = make_schedule(DilatedPattern([Segments(segment)]), 1024, 8, 1, num_inner_devices=num_inner)
    assert one.outer_size == outer_size


def crossings(text, inner):
    """How often a device sends to one of another group, and around its own."""
    across = around = 0
    for permute in permutes(text):
        is_across = {source // inner != destination // inner for source, destination in permute.pairs}
        assert len(is_across) == 1  # either all devices cross, or none
        across, around = across + permute.trips * max(is_across), around + permute.trips * (not max(is_across))
    return across, around


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)], ids=["queries travel back", "keys travel back"])
@pytest.mark.quick("queries travel back-True")
def test_a_ring_crosses_the_outer_axis_as_seldom_as_can_be(heads, gradient):
    """And sends the bytes of a flat ring, which are those of the planner."""
    outer, inner, length = 4, 2, 256
    mesh = make_mesh(dcn=outer, ici=inner)
    sharding = NamedSharding(mesh, P(None, AXES))
    arrays = [jax.ShapeDtypeStruct((1, length, n, 6), jnp.float32, sharding=sharding) for n in (*heads, heads[1])]
    attend = functools.partial(ring_dilated_attention, pattern=[Segments(length)], mesh=mesh, axis_name=AXES)

    def gradients(*arrays):
        out, back = jax.vjp(attend, *arrays)
        return out, back(out)

    text = jax.jit(gradients if gradient else attend).lower(*arrays).compile().as_text()
    across, around = crossings(text, inner)
    # Keys forward; backward what is streamed and the sums of its gradients: each array is a message of its own.
    assert across % (outer - 1) == 0
    assert around * (outer - 1) == across * outer * (inner - 1)
    sizes = {"num_tokens": length, "num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 6, "dtype": "float32"}
    (ring, *_) = plan(
        [Segments(length)],
        mesh={"dcn": outer, "ici": inner},
        axis_name=AXES,
        device="cpu",
        has_gradient=gradient,
        **sizes,
    ).forecasts
    assert bytes_sent(text) == {"collective-permute": ring.num_bytes("forward") + gradient * ring.num_bytes("backward")}


def test_the_planner_counts_what_crosses_the_outer_axis():
    """Keys of one device for each other node, where a flat ring has those of each other device cross."""
    sizes = {"num_tokens": 2**20, "num_heads": 32, "num_kv_heads": 8, "device": "H100", "has_gradient": False}
    compared = [
        plan([Segments(2**20)], mesh=mesh, axis_name=axis_name, is_causal=False, **sizes)
        for mesh, axis_name in (({"dcn": 4, "ici": 8}, AXES), ({"seq": 32}, "seq"))
    ]
    nested, flat = (one.rows[0] for one in compared)
    of_device = 2**20 // 32 * 8 * 2 * 128 * 2
    assert (nested["bytes_between_nodes"], flat["bytes_between_nodes"]) == (3 * of_device, 31 * of_device)
    assert nested["bytes_forward"] == flat["bytes_forward"]
    assert "axis_name=('dcn', 'ici')" in compared[0].example
    # Tokens are exchanged along the inner axis alone.
    exchange = next(row for row in compared[0].rows if row["strategy"] == "all_to_all")
    assert exchange["exchange_size"] == 8


def test_rings_inside_a_node_cross_no_network():
    sizes = {"num_tokens": 2**20, "num_heads": 32, "device": "H100", "mesh": {"dcn": 4, "ici": 8}, "axis_name": AXES}
    compared = plan([Segments(2**18)], **sizes)
    assert {row["bytes_between_nodes"] for row in compared.rows} == {0}


def test_the_command_takes_two_axes(capsys):
    assert main(["plan", "--mesh", "node=4", "seq=8", "--axis-name", "node,seq", "segments:4k", "--tokens", "64k"]) == 0
    assert "Segments(length=4096, rate=1)" in capsys.readouterr().out


def test_exchanges_stay_within_the_inner_axis():
    mesh, length = make_mesh(dcn=2, ici=4), 64
    array = jax.ShapeDtypeStruct((1, length, 8, 4), jnp.float32, sharding=NamedSharding(mesh, P(None, AXES)))
    options = {"mesh": mesh, "axis_name": AXES, "strategy": "all_to_all"}
    attend = functools.partial(ring_dilated_attention, pattern=[Segments(length)], **options)
    record = ringjax.explain(attend, array, array, array)
    assert {one.ulysses_size for one in record.calls[0][0].forecasts[0].implemented} == {4}
    with pytest.raises(ValueError, match="exchange_size=8 does not serve 4 devices"):
        jax.eval_shape(functools.partial(attend, exchange_size=8), array, array, array)


def test_names_that_are_no_axes():
    array = jnp.ones((1, 8, 2, 4))
    attend = functools.partial(ring_dilated_attention, array, array, array, **DENSE)
    with pytest.raises(TypeError, match=r"axis_name=\('dcn', 3\) must be the name of a mesh axis"):
        attend(axis_name=("dcn", 3))
    for names in ((), ["dcn", "ici"]):
        with pytest.raises(TypeError, match="must be the name of a mesh axis, such as 'seq', or a tuple of names"):
            attend(axis_name=names)
    with pytest.raises(ValueError, match=r"axis_name=\('dcn', 'dcn'\) has a name twice"):
        attend(axis_name=("dcn", "dcn"))


def test_the_mesh_of_two_axes():
    mesh = ringjax.make_mesh((2, 2, 2), ("ici", "data", "dcn"), axis_name=AXES)
    assert dict(mesh.shape) == {"ici": 2, "data": 2, "dcn": 2}
    numbers = np.vectorize(lambda device: device.id)(mesh.devices)  # [ici, data, dcn]
    # The inner axis goes through neighbors, the outer one from these to the next, and batches lie apart.
    np.testing.assert_array_equal(numbers.transpose(1, 2, 0).ravel(), np.arange(8))
    with pytest.raises(ValueError, match=r"axis_name=\('dcn', 'seq'\) is not among"):
        ringjax.make_mesh((2, 2), AXES, axis_name=("dcn", "seq"))


def test_tokens_are_padded_over_both_axes():
    mesh = make_mesh(dcn=2, ici=4)
    tokens, documents = ringjax.pad_to_mesh(jnp.ones((2, 13, 4)), mesh=mesh, axis_name=AXES)
    assert tokens.shape == (2, 16, 4)
    assert tokens.sharding.is_equivalent_to(NamedSharding(mesh, P(None, AXES)), 3)
    assert jax.device_get(documents)[0, 11:].tolist() == [0, 0, -1, -1, -1]
    assert ringjax.unpad(tokens, 13).shape == (2, 13, 4)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
@pytest.mark.quick("AxisType.Auto")
def test_a_module_and_its_cache_over_two_axes(kind):
    """The prompt in one call, then a token at a time: the rows of the cache lie along both axes."""
    mesh, width, length = make_mesh(kind, dcn=2, ici=2), 16, 24
    options = {"pattern": [Segments(8), Segments(32, 2)], "is_causal": True, "rope_theta": 100.0, "num_kv_heads": 2}
    make = lambda **more: ringjax.RingDilatedAttention(4, width, **options, **more, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, length, width), jnp.float32)
    expected = make()(x)
    with jax.set_mesh(mesh):
        module = make(axis_name=AXES)
        sharded = jax.device_put(x, NamedSharding(mesh, P(None, AXES)))
        np.testing.assert_allclose(jax.device_get(nnx.jit(lambda m, x: m(x))(module, sharded)), expected, atol=1e-5)
        module.init_cache((2, length, width), jnp.float32)
        rows = next(leaf for leaf in jax.tree.leaves(nnx.state(module, nnx.Cache)) if leaf.ndim == 4)
        assert rows.sharding.spec[1] == AXES
        call = nnx.jit(lambda m, x, prefill: m(x, decode=True, prefill=prefill), static_argnames="prefill")
        parts = [call(module, jax.device_put(x[:, :16], NamedSharding(mesh, P(None, AXES))), prefill=True)]
        parts += [call(module, x[:, number : number + 1], prefill=False) for number in range(16, length)]
    np.testing.assert_allclose(np.concatenate(jax.device_get(parts), axis=1), expected, atol=1e-5)
