"""The devices of a mesh: each once, rings within nodes and round boxes of a TPU's grid, wherever the axis stands."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import ringjax
from ringjax._mesh.device_order import is_round, round_walk, snake

NAMES = ("data", "fsdp", "seq", "tensor")


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int = 0
    slice_index: int | None = None
    platform: str = "gpu"
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


def grid(*shape, slices=1):
    """A TPU's devices, two cores to a chip if there is a fourth side, in an order that is not theirs."""
    cells = itertools.product(range(slices), *(range(side) for side in (*shape, 1, 1, 1)[:4]))
    devices = [Device(i, 0, cell[0], "tpu", cell[1:4], cell[4]) for i, cell in enumerate(cells)]
    return [devices[i] for i in np.random.default_rng(0).permutation(len(devices))]


def nodes(count, size):
    return [Device(size * node + i, node, node) for node in range(count) for i in range(size)]


def hops(mesh, distance, exchange_size=1):
    """The distances from each device of a ring to the next, for all rings: between groups of devices that exchange."""
    rings = np.moveaxis(mesh.devices, mesh.axis_names.index("seq"), 0)
    nexts = np.roll(rings, -exchange_size, axis=0)
    return np.array([distance(*pair) for pair in zip(rings.ravel(), nexts.ravel(), strict=True)])


def along_the_grid(one, other):
    places = np.array([(*device.coords, device.core_on_chip) for device in (one, other)])
    return np.abs(places[0] - places[1]).sum() + 100 * (one.slice_index != other.slice_index)


def across_nodes(one, other):
    return one.process_index != other.process_index


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
@settings(max_examples=60, deadline=None)
def test_walks(shape):
    for walk in (snake(shape), round_walk(shape)):
        assert sorted(walk) == list(itertools.product(*map(range, shape)))
        steps = np.abs(np.diff(np.array(walk), axis=0)).sum(axis=1)
        assert (steps == 1).all()
    ends = np.abs(np.subtract(walk[0], walk[-1])).sum()
    assert (ends <= 1) == (is_round(shape) or math.prod(shape) == 1)


@pytest.mark.parametrize("names", [NAMES, ("seq", "tensor", "fsdp", "data"), ("tensor", "data", "seq", "fsdp")])
@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((4, 8), (1, 1, 32, 1)),
        ((4, 8), (2, 1, 8, 2)),
        ((2, 4), (1, 2, 2, 2)),
        ((16, 16), (4, 2, 16, 2)),
        ((2, 2, 4), (2, 2, 4, 1)),
        ((4, 4, 4), (1, 1, 64, 1)),
        ((2, 2, 1, 2), (1, 1, 8, 1)),
    ],
)
def test_rings_walk_round_the_grid(shape, sizes, names):
    sizes = dict(zip(NAMES, sizes, strict=True))
    devices = grid(*shape)
    mesh = ringjax.make_mesh([sizes[name] for name in names], names, devices=devices)
    assert mesh.shape == {name: sizes[name] for name in names}
    assert set(mesh.devices.flat) == set(devices)
    assert (hops(mesh, along_the_grid) == 1).all()


@pytest.mark.parametrize("names", [NAMES, ("seq", "tensor", "fsdp", "data")])
@pytest.mark.parametrize(
    ("shape", "sizes", "exchange_size"),
    [
        ((4, 8), (1, 1, 32, 1), 8),
        ((4, 8), (1, 1, 32, 1), 16),
        ((4, 8), (2, 1, 16, 1), 4),
        ((4, 8), (1, 2, 8, 2), 4),
        ((2, 4), (1, 1, 8, 1), 2),
        ((16, 16), (1, 1, 256, 1), 16),
        ((4, 4, 4), (1, 1, 64, 1), 8),
    ],
)
def test_rings_between_groups_walk_round_the_grid(shape, sizes, exchange_size, names):
    sizes = dict(zip(NAMES, sizes, strict=True))
    devices = grid(*shape)
    arguments = {"devices": devices, "exchange_size": exchange_size}
    mesh = ringjax.make_mesh([sizes[name] for name in names], names, **arguments)
    assert set(mesh.devices.flat) == set(devices)
    assert (hops(mesh, along_the_grid, exchange_size) == 1).all()


def test_groups_stay_inside_a_slice_and_a_node():
    """Those of slices follow each other; nodes are as they are without an exchange."""
    mesh = ringjax.make_mesh((32,), ("seq",), devices=grid(4, 4, slices=2), exchange_size=4)
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    np.testing.assert_array_equal(slices, [0] * 16 + [1] * 16)
    assert sorted(hops(mesh, along_the_grid, 4))[:-8] == [1] * 24
    order = lambda **more: ringjax.make_mesh((32,), ("seq",), devices=nodes(4, 8), **more).devices.tolist()
    assert order(exchange_size=8) == order()


def test_a_ring_leaves_a_slice_once():
    mesh = ringjax.make_mesh((32,), ("seq",), devices=grid(4, 4, slices=2))
    assert sorted(hops(mesh, along_the_grid))[:-2] == [1] * 30


@pytest.mark.parametrize("names", [NAMES, ("seq", "tensor", "fsdp", "data"), ("seq", "data", "tensor", "fsdp")])
@pytest.mark.parametrize(
    ("sizes", "crossings"),
    [((4, 1, 8, 1), 0), ((2, 2, 4, 2), 0), ((1, 1, 32, 1), 4), ((1, 2, 8, 2), 8), ((4, 2, 1, 4), 0)],
)
def test_rings_cross_the_network_as_little_as_can_be(sizes, crossings, names):
    """Where eight places of a ring are two devices each, the four rings lie in two nodes each, with two crossings."""
    sizes = dict(zip(NAMES, sizes, strict=True))
    devices = nodes(4, 8)
    shuffled = [devices[i] for i in np.random.default_rng(0).permutation(32)]
    mesh = ringjax.make_mesh([sizes[name] for name in names], names, devices=shuffled)
    assert set(mesh.devices.flat) == set(devices)
    assert hops(mesh, across_nodes).sum() == crossings
    tensor = np.moveaxis(mesh.devices, names.index("tensor"), 0).reshape(sizes["tensor"], -1)
    assert (np.vectorize(lambda device: device.process_index)(tensor).std(axis=0) == 0).all()


def test_a_part_of_the_devices():
    """The first of them are taken; a part of a grid that is no box keeps its order."""
    mesh = ringjax.make_mesh((2, 3), ("data", "seq"), (AxisType.Auto,) * 2)
    assert mesh.devices.ravel().tolist() == jax.devices()[:6]
    assert mesh.axis_types == (AxisType.Auto,) * 2
    devices = sorted(grid(4, 4), key=lambda device: device.id)[:6]
    assert ringjax.make_mesh((6,), ("seq",), devices=devices).devices.tolist() == devices


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((2, 4), ("seq",)), "axis_shapes=.* does not fit axis_names=.*: give each name a positive whole size"),
        (((0,), ("seq",)), "give each name a positive whole size"),
        (((2.0,), ("seq",)), "give each name a positive whole size"),
        (((2, 4), ("seq", "seq")), "axis_names=.* has a name twice"),
        (((8,), ("data",)), "axis_name='seq' is not among axis_names=.*: name the axis of the sequence"),
        (((16,), ("seq",)), r"axis_shapes=\(16,\) asks for 16 devices, but there are 8: ask for fewer"),
    ],
)
def test_wrong_meshes(arguments, words, unchecked):
    with pytest.raises(ValueError, match=words):
        ringjax.make_mesh(*arguments)


@pytest.mark.parametrize("size", [0, 3, 2.0])
def test_groups_that_do_not_fill_a_ring(size, unchecked):
    words = f"exchange_size={size} does not divide the 8 devices of the axis 'seq': give how many"
    with pytest.raises(ValueError, match=words):
        ringjax.make_mesh((8,), ("seq",), exchange_size=size)
