"""The same numbers on every mesh, however its axes are typed, and under every transformation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import (
    assert_close,
    loss,
    make_mesh,
    random_arguments,
    reference_results,
    ring_results,
    tolerance,
    with_gradients,
)

from ringjax import pad_to_mesh, ring_dilated_attention

ARGUMENTS = {"segment_lengths": (8, 32), "dilation_rates": (1, 4), "is_causal": True}
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
ring_loss = loss(ring_dilated_attention, **ARGUMENTS)


@pytest.fixture(params=KINDS)
def mesh(request):
    return make_mesh(KINDS[request.param], data=2, seq=2, tensor=2)


def place(arrays, mesh, *spec):
    """Puts arrays on the mesh; heads that an axis does not divide are not sharded."""
    spec = spec or ("data", "seq", "tensor")

    def put(array):
        fits = [
            name if name and size % mesh.shape[name] == 0 else None
            for name, size in zip(spec, array.shape, strict=False)
        ]
        return jax.device_put(array, NamedSharding(mesh, P(*fits)))

    return [put(array) for array in arrays]


def check(function, arrays, originals=None, **arguments):
    expected = reference_results(originals or arrays, **{**ARGUMENTS, **arguments})
    assert_close(jax.device_get(jax.jit(with_gradients(function))(*arrays)), expected)


# Four key/value heads over two devices, with a rate of four: offsets that followed local numbers would be wrong. With
# one key/value head, or three over two devices, the tensor axis does not divide them.
@pytest.mark.quick("auto-(8, 4)-interleaved")
@pytest.mark.parametrize(
    ("heads", "offsets"), [((8, 4), "interleaved"), ((8, 4), "blocked"), ((4, 1), "interleaved")], ids=str
)
def test_mesh_that_the_arrays_carry(mesh, heads, offsets):
    arrays = random_arguments(32, heads, batch=(2,))
    check(loss(ring_dilated_attention, offsets=offsets, **ARGUMENTS), place(arrays, mesh), arrays, offsets=offsets)


@pytest.mark.slow
def test_key_value_heads_of_whole_groups(mesh):
    """With four devices along eight heads, each pair of devices shares one of two key/value heads."""
    mesh = make_mesh(mesh.axis_types[0], seq=2, tensor=4)
    arrays = random_arguments(32, (8, 2), batch=(2,))
    check(ring_loss, place(arrays, mesh, None, "seq", "tensor"), arrays)


@pytest.mark.quick("explicit")
def test_key_value_heads_that_nothing_divides(mesh, unchecked):
    arrays = random_arguments(32, (6, 3), batch=(2,))
    if mesh.axis_types[0] == AxisType.Auto:
        check(ring_loss, place(arrays, mesh), arrays)
    else:
        with pytest.raises(ValueError, match="3 key/value heads do not divide over the 2 devices of \\('tensor',\\)"):
            ring_dilated_attention(*place(arrays, mesh), **ARGUMENTS)


@pytest.mark.quick("explicit")
def test_mesh_of_the_context(mesh):
    arrays = random_arguments(32, (8, 4), batch=(2,))
    with jax.set_mesh(mesh):
        check(ring_loss, place(arrays, mesh), arrays)
        out = jax.jit(functools.partial(ring_dilated_attention, **ARGUMENTS))(*arrays)  # not sharded yet
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "seq")), out.ndim)
    np.testing.assert_allclose(out, reference_results(arrays, **ARGUMENTS)[0], rtol=0, atol=tolerance())


@pytest.mark.quick("auto")
def test_mesh_argument_and_eager_call(mesh):
    arrays = random_arguments(32, (8, 4), batch=(2,))
    expected = reference_results(arrays, **ARGUMENTS)
    out, lse = ring_dilated_attention(*place(arrays, mesh), mesh=mesh, return_residual=True, **ARGUMENTS)
    assert tuple(out.sharding.spec)[:2] == ("data", "seq")
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=tolerance())
    np.testing.assert_allclose(lse, expected[1], rtol=0, atol=tolerance())
    with jax.set_mesh(mesh):
        assert_close(with_gradients(ring_loss)(*place(arrays, mesh)), expected)


@pytest.mark.parametrize("manual", [("data", "seq"), ("seq",)])
def test_an_axis_of_one_device_that_the_callers_shard_map_left(manual):
    """It is left alone: another shard_map around the call would be one too many."""
    mesh = make_mesh(data=2, seq=4, tensor=1)
    query = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 4, 8)), jnp.float32)
    attend = lambda query: ring_dilated_attention(query, query, query, segment_lengths=(8,), dilation_rates=(2,))
    spec = P("data", "seq") if "data" in manual else P(None, "seq")
    checks = {"check_vma": "data" not in manual}
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={*manual}, **checks)
    gradient = lambda attend: jax.jit(jax.grad(lambda query: jnp.sin(attend(query)).sum()))(query)
    np.testing.assert_allclose(gradient(mapped), gradient(attend), rtol=0, atol=1e-5)


def test_mesh_without_the_axis(mesh):
    mesh = make_mesh(mesh.axis_types[0], data=2, tensor=4)
    arrays = random_arguments(32, (8, 4), batch=(2,))
    check(ring_loss, place(arrays, mesh, "data", None, "tensor"), arrays)


@pytest.mark.quick("explicit")
def test_other_axis_name(mesh):
    arrays = random_arguments(32, (8, 4), batch=(2,))
    arguments = {**ARGUMENTS, "axis_name": "data"}
    check(loss(ring_dilated_attention, **arguments), place(arrays, mesh, "seq", "data", "tensor"), arrays)


@pytest.mark.slow
def test_length_that_the_mesh_does_not_divide(mesh):
    arrays = random_arguments(29, (8, 4), batch=(2,))
    check(ring_loss, place(arrays, mesh, "data", None, "tensor"), arrays)
    check(ring_loss, place([array[:, :1] for array in arrays], mesh, "data"), [array[:, :1] for array in arrays])


@pytest.mark.quick("auto-('data', 'seq')")
@pytest.mark.parametrize(
    ("kind", "axes"),
    [("auto", ("data", "seq")), ("explicit", ("data", "seq")), ("auto", ("data",)), ("explicit", ("seq",))],
    ids=str,
)
def test_inside_the_callers_shard_map(kind, axes):
    mesh = make_mesh(KINDS[kind], data=2, seq=2, tensor=2)
    arrays = random_arguments(32, (8, 4), batch=(2,))
    spec = P(*(name if name in axes else None for name in ("data", "seq")))
    mapped = jax.shard_map(
        lambda *shards: ring_dilated_attention(*shards, return_residual=True, **ARGUMENTS),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names=set(axes),
    )
    check(loss(lambda *shards, return_residual: mapped(*shards)), place(arrays, mesh), arrays)


def test_whole_sequences_inside_the_callers_shard_map_are_refused():
    mesh = make_mesh(data=2, seq=2)
    array = jnp.ones((2, 32, 4, 8))
    attend = functools.partial(ring_dilated_attention, **ARGUMENTS)
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=P("data"), out_specs=P("data", "seq"))
    with pytest.raises(ValueError, match="query, key, value would be the same shard on all devices of axis_name='seq'"):
        mapped(array, array, array)
    shards = P("data", "seq")
    half = jax.shard_map(attend, mesh=mesh, in_specs=(shards, P("data"), P("data")), out_specs=shards)
    with pytest.raises(ValueError, match="key, value would be the same shard on all devices of axis_name='seq'"):
        half(array, array, array)
    offset = lambda *arrays: attend(*arrays, query_offset=jax.lax.axis_index("seq") * 16)
    with pytest.raises(ValueError, match="query_offset differs between the devices of axis_name='seq': it is the"):
        jax.shard_map(offset, mesh=mesh, in_specs=shards, out_specs=shards)(array, array, array)
    given = functools.partial(attend, spec=shards)
    with pytest.raises(ValueError, match="names the axis 'data', over which the caller's shard_map maps"):
        jax.shard_map(given, mesh=mesh, in_specs=shards, out_specs=shards)(array, array, array)
    alone = jax.shard_map(attend, mesh=make_mesh(data=2, seq=1), in_specs=P("data"), out_specs=P("data", "seq"))
    assert alone(array, array, array).shape == array.shape  # one device has all of the sequence


@pytest.mark.quick("explicit")
def test_inside_a_shard_map_that_is_not_checked(mesh):
    arrays = random_arguments(32, (8, 4), batch=(2,))
    mapped = jax.shard_map(
        lambda *shards: ring_dilated_attention(*shards, return_residual=True, **ARGUMENTS),
        mesh=mesh,
        in_specs=P("data", "seq"),
        out_specs=P("data", "seq"),
        check_vma=False,
    )
    check(loss(lambda *shards, return_residual: mapped(*shards)), place(arrays, mesh, "data", "seq"), arrays)


@pytest.mark.quick("explicit")
def test_keys_that_are_the_same_along_a_manual_axis(mesh):
    """A gradient is summed over the mesh axes along which its argument is the same."""
    query, key, value = random_arguments(32, (8, 4), batch=(2,))
    key, value = (np.repeat(array[:1], 2, axis=0) for array in (key, value))
    expected = reference_results((query, key, value), **ARGUMENTS)
    mapped = jax.shard_map(
        lambda *shards: ring_dilated_attention(*shards, return_residual=True, **ARGUMENTS),
        mesh=mesh,
        in_specs=(P("data", "seq"), P(None, "seq"), P(None, "seq")),
        out_specs=P("data", "seq"),
        axis_names={"data", "seq"},
    )
    arrays = place([query], mesh, "data", "seq") + place((key[:1], value[:1]), mesh, None, "seq")
    out, lse, *grads = jax.jit(with_gradients(loss(lambda *shards, return_residual: mapped(*shards))))(*arrays)
    summed = [expected[2], *(grad.sum(axis=0, keepdims=True) for grad in expected[3:])]
    assert_close(jax.device_get([out, lse, *grads]), [*expected[:2], *summed])


@pytest.mark.quick("('auto', 'explicit')")
@pytest.mark.parametrize("kinds", [("auto", "explicit"), ("explicit", "auto")], ids=str)
def test_axes_of_both_kinds(kinds):
    """In one mesh, whether a spec names them or not."""
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=tuple(KINDS[kind] for kind in kinds))
    arrays = random_arguments(29, (4, 2), batch=(2,))
    spec = P("data", "seq") if kinds[0] == "auto" else None
    with jax.set_mesh(mesh):
        check(loss(ring_dilated_attention, spec=spec, **ARGUMENTS), place(arrays, mesh, "data"), arrays)
        tokens, documents = pad_to_mesh(*place([arrays[0][..., 0]], mesh, "data"))
    assert tokens.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "seq")), tokens.ndim)
    assert documents.shape == (2, 32)


@pytest.mark.quick("auto")
def test_checkpoint_and_vmap(mesh):
    arrays = random_arguments(32, (8, 4), batch=(3, 2))
    call = functools.partial(ring_dilated_attention, return_residual=True, **ARGUMENTS)
    nested = loss(lambda *arrays, return_residual: jax.checkpoint(jax.vmap(jax.checkpoint(call)))(*arrays))
    check(nested, place(arrays, mesh, None, "data", "seq", "tensor"), arrays)


def test_the_same_numbers_on_every_mesh():
    arrays = random_arguments(32, (8, 4), batch=(2,))
    one = ring_results(arrays, **ARGUMENTS)
    for sizes in ({"seq": 8}, {"tensor": 4, "seq": 2}):
        mesh = make_mesh(**sizes)
        placed = place(arrays, mesh, *(name if name in sizes else None for name in ("data", "seq", "tensor")))
        assert_close(ring_results(placed, **ARGUMENTS), one, atol=1e-12)
