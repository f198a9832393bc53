"""Measures the figures of the devices that there are: what `ringjax plan --measure` writes."""

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax._forecast.machine import Machine, machine_of
from ringjax._mesh.mesh import lowered_platform

_ROWS, _WIDTH, _STEPS, _ROUNDS = 256, 64, 64, 5


def measure() -> Machine:
    """Returns the figures of the devices of this machine, all of which work at the same time.

    Products are those of tiles of logits, so that the rate is one that attention can reach.
    """
    devices = jax.devices()
    mesh = Mesh(devices, ("seq",), axis_types=(AxisType.Auto,))
    usual = machine_of(lowered_platform(devices[0].platform), devices[0].device_kind)
    rates = {size: _product_rate(mesh, size) for size in usual.operations}
    bandwidth, link, latency = _memory_bandwidth(mesh), usual.link_bandwidth, usual.latency
    if len(devices) > 1:
        latency = _permute_seconds(mesh, 1)
        large = 2**18
        link = 4 * large / max(1e-9, _permute_seconds(mesh, large) - latency)
    return dataclasses.replace(
        usual,
        name=f"{devices[0].device_kind}, measured",
        operations=rates,
        memory_bandwidth=bandwidth,
        link_bandwidth=link,
        node_size=max(usual.node_size, len(devices)),
        latency=latency,
    )


def write(machine: Machine, path: str) -> None:
    """Writes figures to a file that `device=` takes."""
    with open(path, "w") as file:
        json.dump(dataclasses.asdict(machine), file, indent=1)


def _best(call: Callable[..., Any], *arrays: jax.Array) -> float:
    jax.block_until_ready(call(*arrays))
    seconds = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready(call(*arrays))
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _on_all(mesh: Mesh, function: Callable[..., Any], shape: tuple[int, ...], dtype: Any) -> float:
    sharding = NamedSharding(mesh, P("seq"))
    array = jax.device_put(jnp.full((mesh.size * shape[0], *shape[1:]), 0.01, dtype), sharding)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("seq"), out_specs=P("seq"))
    return _best(jax.jit(mapped), array)


def _product_rate(mesh: Mesh, itemsize: int) -> float:
    dtype = {2: jnp.bfloat16, 4: jnp.float32, 8: jnp.float64}[itemsize]

    def tiles(rows: jax.Array) -> jax.Array:
        def body(_: Any, rows: jax.Array) -> jax.Array:
            weights = jnp.exp(jnp.einsum("hqd,hkd->hqk", rows, rows))
            return rows + jnp.einsum("hqk,hkd->hqd", weights, rows) * 1e-6

        return jax.lax.fori_loop(0, _STEPS, body, rows)

    heads = 8
    with jax.enable_x64(itemsize == 8):
        seconds = _on_all(mesh, tiles, (heads, _ROWS, _WIDTH), dtype)
    return 4.0 * heads * _ROWS**2 * _WIDTH * _STEPS / seconds


def _memory_bandwidth(mesh: Mesh, numbers: int = 2**22) -> float:
    return 2 * 4 * numbers / _on_all(mesh, lambda array: array + 1, (numbers,), jnp.float32)


def _permute_seconds(mesh: Mesh, numbers: int, steps: int = 16) -> float:
    around = [(device, (device + 1) % mesh.size) for device in range(mesh.size)]
    hop = lambda _, array: jax.lax.ppermute(array, "seq", around)
    return _on_all(mesh, lambda array: jax.lax.fori_loop(0, steps, hop, array), (numbers,), jnp.float32) / steps
