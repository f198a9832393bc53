"""Meshes with data, FSDP, sequence and tensor axes: what a training step gathers, and what lies on a device."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parts.byte_model import NGRAMS, NUM_FEATURES
from parts.distribution import TOKENS, make_mesh
from parts.training import make_trainer
from train_lm import parse_arguments

import ringjax
from benchmarks.programs import gathers, has_dimension

BATCH, LENGTH = 12, 2 * 509  # which no product of what a device holds is
OPTIONS = f"--sequence-length {LENGTH} --batch-size {BATCH} --segment-lengths 509,{LENGTH} --dilation-rates 1,4"
OPTIONS += " --layers 1 --heads 6 --width 96 --ngram-bits 8"


def compile_training_step(mesh, options, compiler_options=()):
    arguments = parse_arguments(options.split())
    with jax.enable_x64(False), jax.set_mesh(mesh):
        trainer = make_trainer(arguments, mesh)
        shape, sharding = (arguments.batch_size, arguments.sequence_length), NamedSharding(mesh, TOKENS)
        batch = [
            jax.ShapeDtypeStruct((*shape, *more), np.int32, sharding=sharding) for more in ((NUM_FEATURES,), (), ())
        ]
        return trainer.step.lower(trainer.abstract, *batch).compile(dict(compiler_options))


def crossed_axes(mesh, groups):
    """The axes along which devices of a group differ."""
    places = np.stack(np.unravel_index(range(mesh.size), mesh.devices.shape), axis=-1)  # programs count in this order
    of_group = places[groups]  # [count, size, axes]
    differ = (of_group != of_group[:, :1]).any(axis=(0, 1))
    return {name for name, is_crossed in zip(mesh.axis_names, differ, strict=True) if is_crossed}


@pytest.mark.quick("tensor=2,seq=2,data=2")
@pytest.mark.parametrize("axes", ["fsdp=2,seq=2,tensor=2", "seq=2,data=2,fsdp=2", "tensor=2,seq=2,data=2"])
def test_only_parameters_are_gathered(axes):
    """Outside the optimizer, along the axes that they are sharded over; no array has all tokens of a sequence."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in axes.split(","))}
    mesh = make_mesh({name: 1 for name in ("data", "fsdp", "seq", "tensor") if name not in sizes} | sizes)
    text = compile_training_step(mesh, OPTIONS).as_text()
    of_device = BATCH * LENGTH // math.prod(sizes.get(name, 1) for name in ("data", "fsdp", "seq"))
    for size in {LENGTH, BATCH * LENGTH} - {of_device * len(NGRAMS)}:  # a device's own numbers of the last bytes
        assert not has_dimension(text, size)
    found = [gather for gather in gathers(text) if "optimizer" not in gather.name]
    crossed = [crossed_axes(mesh, gather.groups) for gather in found]
    assert set().union(*crossed) == {"fsdp", "tensor"} & sizes.keys()
    # A matrix is gathered along its FSDP axis alone, the tables of embeddings along both that they are cut over.
    assert sum(len(axes) > 1 for axes in crossed) == 2 * ("fsdp" in sizes and "tensor" in sizes)
    assert "all-to-all" not in text


def test_a_gather_along_the_sequence_is_seen():
    mesh = make_mesh({"data": 1, "fsdp": 2, "seq": 2, "tensor": 2})
    whole = jax.jit(lambda array: array * 2, out_shardings=NamedSharding(mesh, P(("data", "fsdp"))))
    array = jax.ShapeDtypeStruct((BATCH, LENGTH), np.float32, sharding=NamedSharding(mesh, TOKENS))
    text = whole.lower(array).compile().as_text()
    assert has_dimension(text, LENGTH)
    (gather,) = gathers(text)
    assert crossed_axes(mesh, gather.groups) == {"seq"}


def test_groups_of_devices_are_read():
    """In each of the ways in which a compiled program writes them."""
    gather = lambda groups: f"  %a = f32[8] all-gather(%b), channel_id=1, replica_groups={groups}, dimensions={{0}}"
    text = "\n".join(
        gather(groups)
        for groups in (
            "{{0,2},{1,3}}",
            "[2,2]<=[2,2]T(1,0)",
            "[2,2]<=[4]",
            "mesh['a'=2,'b'=2] {'a'}",
            "mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}",
        )
    )
    expected = [[0, 2], [1, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    assert [gather.groups.tolist() for gather in gathers(text)] == list(expected)


def test_state_shrinks_with_its_axes():
    """Parameters and the optimizer's state: on each device 1 / (fsdp x tensor) of them, but for the norms' scales."""

    def held(fsdp, tensor):
        mesh = make_mesh({"data": 1, "fsdp": fsdp, "seq": 8 // (fsdp * tensor), "tensor": tensor})
        with jax.set_mesh(mesh):
            arrays = jax.tree.leaves(make_trainer(parse_arguments([]), mesh).abstract)
        return sum(math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in arrays)

    whole = held(1, 1)
    for fsdp, tensor in ((2, 1), (1, 2), (2, 2), (4, 2), (2, 4)):
        assert held(fsdp, tensor) * fsdp * tensor == pytest.approx(whole, rel=0.02)


ATTENTION = {"segment_lengths": (8, 32), "dilation_rates": (1, 4), "is_causal": True}
AXES = ("data", "fsdp", "seq", "tensor")
ORDERS = [AXES, ("seq", "tensor", "fsdp", "data"), ("tensor", "seq", "data", "fsdp")]


def mesh_of(names):
    """One of eight devices, the sequence over two of them."""
    sizes = [{"data": 1}.get(name, 2) for name in names]
    return ringjax.make_mesh(sizes, names, (AxisType.Auto,) * 4)


def linen_module(mesh):
    partitioned = lambda init, *names: linen.with_logical_partitioning(init, names)
    lecun, normal = linen.initializers.lecun_normal(), linen.initializers.normal()
    module = ringjax.linen.RingDilatedAttention(
        4,
        kernel_init=partitioned(lecun, "embed", "heads", "head"),
        out_kernel_init=partitioned(lecun, "heads", "head", "embed"),
        bias_init=partitioned(normal, "heads", "head"),
        out_bias_init=normal,
        **ATTENTION,
        mesh=mesh,
        spec=P(("data", "fsdp"), "seq", "tensor"),
    )
    rules = (("embed", "fsdp"), ("heads", "tensor"), ("head", None))
    shardings = lambda params: linen.logical_to_mesh_sharding(linen.get_partition_spec(params), mesh, rules)
    return (
        lambda inputs: module.init(jax.random.key(0), inputs),
        shardings,
        lambda params, inputs: module.apply(linen.unbox(params), inputs),
    )


def nnx_module(mesh):
    partitioned = lambda init, *names: nnx.with_partitioning(init, names, eager_sharding=False)
    lecun, normal = nnx.initializers.lecun_normal(), nnx.initializers.normal()
    build = lambda inputs: ringjax.RingDilatedAttention(
        4,
        inputs.shape[-1],
        kernel_init=partitioned(lecun, "fsdp", "tensor", None),
        out_kernel_init=partitioned(lecun, "tensor", None, "fsdp"),
        bias_init=partitioned(normal, "tensor", None),
        out_bias_init=normal,
        rngs=nnx.Rngs(0),
        **ATTENTION,
        mesh=mesh,
        spec=P(("data", "fsdp"), "seq", "tensor"),
    )
    definition = nnx.split(nnx.eval_shape(lambda: build(INPUTS)))[0]
    make = lambda inputs: nnx.state(build(inputs))
    return (
        make,
        lambda params: nnx.get_named_sharding(params, mesh),
        lambda params, inputs: nnx.merge(definition, params)(inputs),
    )


INPUTS = np.random.default_rng(0).normal(size=(2, 32, 16))


@pytest.mark.quick("nnx_module-order2")
@pytest.mark.parametrize(
    ("module", "order"),
    [(linen_module, ORDERS[0]), (linen_module, ORDERS[1]), (nnx_module, ORDERS[0]), (nnx_module, ORDERS[2])],
)
def test_metadata_of_the_modules_shard_their_parameters(module, order):
    """The same outputs and gradients as on one device, with a quarter of each kernel on a device."""
    results = []
    for mesh in (mesh_of(order), Mesh(np.array(jax.devices()[:1]).reshape((1,) * 4), AXES)):
        make, shardings, apply = module(mesh)
        params = jax.jit(make, out_shardings=shardings(jax.eval_shape(make, INPUTS)))(INPUTS)
        loss = lambda params, inputs, apply=apply: jnp.sin(apply(params, inputs)).sum()
        inputs = jax.device_put(INPUTS, NamedSharding(mesh, TOKENS))
        results.append(jax.device_get(jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(params, inputs))))
        parts = mesh.shape["fsdp"] * mesh.shape["tensor"]
        kernels = [array for array in jax.tree.leaves(params) if array.ndim == 3]
        assert len(kernels) == 4
        assert all(kernel.addressable_shards[0].data.size == kernel.size // parts for kernel in kernels)
    for sharded, whole in zip(*results, strict=True):
        np.testing.assert_allclose(sharded, whole, rtol=0, atol=2e-5)  # parameters are in float32
