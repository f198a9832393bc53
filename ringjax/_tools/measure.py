"""Measures the figures of this machine's devices, which `ringjax plan --measure` writes."""

import dataclasses
import functools
import itertools
import json
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax._attention import ring_dilated_attention
from ringjax._mesh.mesh import lowered_platform
from ringjax._pattern.branch import Segments
from ringjax._recording import recording
from ringjax._tools.forecast import forecast
from ringjax._tools.machine import Machine, machine_of

_ROUNDS, _STEPS = 10, 4
# The samples attend inside each shard, in one segment or in many, at two widths, with enough rows to keep devices busy.
_HEADS, _WIDTHS, _SEGMENTS, _ROWS, _ROWS_ON_CPUS = 8, (32, 128), (1, 32), 8192, 1024
# The number of elements in a small message and in a large one.
_MESSAGES = 1, 2**20
_DTYPES = {2: jnp.bfloat16, 4: jnp.float32, 8: jnp.float64}


class _Costs(NamedTuple):
    """The seconds of an operation of attention's products, of a pair besides its products, and of a byte of memory.

    Or the number of each in a call.
    """

    operation: float
    pair: float
    byte: float


class _Sample(NamedTuple):
    """A call of attention, with the numbers of its operations, pairs and bytes."""

    counts: _Costs
    call: Callable[[], Any]


def measure() -> Machine:
    """Returns the figures of this machine's devices, measured while all of them work.

    The rates of products and memory are those that attention itself reaches.
    """
    devices = jax.devices()
    mesh = Mesh(devices, ("seq",), axis_types=(AxisType.Auto,))
    usual = machine_of(lowered_platform(devices[0].platform), devices[0].device_kind)
    sizes = [(size, *sizes) for size in usual.operations for sizes in itertools.product(_WIDTHS, _SEGMENTS)]
    samples = {of_sample: _sample(mesh, usual, *of_sample) for of_sample in sizes}
    calls: dict[Any, Callable[[], Any]] = {name: sample.call for name, sample in samples.items()}
    if len(devices) > 1:
        calls |= {numbers: _permute(mesh, numbers) for numbers in _MESSAGES}
    seconds = _best_in_turns(calls)
    of_size = lambda size: [(one.counts, seconds[name]) for name, one in samples.items() if name[0] == size]
    narrowest = min(usual.operations)
    costs = _costs(of_size(narrowest), usual, narrowest)
    operations = {size: 1 / _operation_cost(of_size(size), costs, usual, size) for size in usual.operations}
    link, latency = usual.link_bandwidth, usual.latency
    if len(devices) > 1:
        few, many = _MESSAGES
        latency = seconds[few] / _STEPS
        link = 4 * (many - few) * _STEPS / max(1e-9, seconds[many] - seconds[few])
    return dataclasses.replace(
        usual,
        name=f"{devices[0].device_kind}, measured",
        operations=operations,
        memory_bandwidth=1 / costs.byte,
        pair_seconds=costs.pair,
        link_bandwidth=link,
        node_size=max(usual.node_size, len(devices)),
        latency=latency,
        is_measured=True,
    )


def write(machine: Machine, path: str) -> None:
    """Writes figures to a file that `device=` takes."""
    with open(path, "w") as file:
        json.dump(dataclasses.asdict(machine), file, indent=1)


def _best_in_turns(calls: dict[Any, Callable[[], Any]]) -> dict[Any, float]:
    """Returns the least seconds of each call. Calls take turns, so that the machine's speed is the same for all."""
    best = dict.fromkeys(calls, math.inf)
    for number, (name, call) in itertools.product(range(_ROUNDS + 1), calls.items()):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        if number:  # the first time warms up
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def _sample(mesh: Mesh, usual: Machine, itemsize: int, width: int, num_segments: int) -> _Sample:
    """Returns a sample of attention in `num_segments` segments of each shard."""
    rows = _ROWS_ON_CPUS if usual.platform == "cpu" else _ROWS
    attend = functools.partial(ring_dilated_attention, pattern=[Segments(rows // num_segments)], mesh=mesh)
    with jax.enable_x64(itemsize == 8):
        array = jnp.full((1, mesh.size * rows, _HEADS, width), 0.01, _DTYPES[itemsize])
        array = jax.device_put(array, NamedSharding(mesh, P(None, "seq")))
        with recording() as records:
            compiled = jax.jit(attend).lower(array, array, array).compile()
    call = records[0].call
    counted = forecast(call, "ring", usual, has_gradient=False)
    num_bytes = counted.forward.memory * usual.memory_bandwidth
    counts = _Costs(counted.operations[0], counted.computed, num_bytes)
    return _Sample(counts, functools.partial(compiled, array, array, array))


def _costs(samples: list[tuple[_Costs, float]], usual: Machine, itemsize: int) -> _Costs:
    """Returns the non-negative costs that best explain the seconds of the samples."""
    counts, seconds = (np.array(column) for column in zip(*samples, strict=True))
    found, _ = scipy.optimize.nnls(counts / seconds[:, None], np.ones(len(samples)))
    # A cost too small to be seen defaults to the known figure of the device.
    known = _Costs(1 / usual.rate(itemsize), usual.pair_seconds, 1 / usual.memory_bandwidth)
    return _Costs(*(float(cost) or other for cost, other in zip(found, known, strict=True)))


def _operation_cost(samples: list[tuple[_Costs, float]], costs: _Costs, usual: Machine, itemsize: int) -> float:
    """Returns the cost of an operation on numbers of another itemsize, given the costs of pairs and bytes."""
    counts, seconds = (np.array(column) for column in zip(*samples, strict=True))
    rest = 1 - counts[:, 1:] @ costs[1:] / seconds
    found, _ = scipy.optimize.nnls(counts[:, :1] / seconds[:, None], rest)
    return float(found[0]) or 1 / usual.rate(itemsize)


def _permute(mesh: Mesh, numbers: int) -> Callable[[], Any]:
    """Returns a function that sends `_STEPS` messages of `numbers` elements, one after the other."""
    around = [(device, (device + 1) % mesh.size) for device in range(mesh.size)]
    hop = lambda _, array: jax.lax.ppermute(array, "seq", around)
    hops = lambda array: jax.lax.fori_loop(0, _STEPS, hop, array)
    array = jax.device_put(jnp.zeros(mesh.size * numbers, jnp.float32), NamedSharding(mesh, P("seq")))
    return functools.partial(jax.jit(jax.shard_map(hops, mesh=mesh, in_specs=P("seq"), out_specs=P("seq"))), array)
