"""The processes of a run, their mesh, and the part of an array that each of them holds."""

import argparse
import contextlib
import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax
from parts.corpus import Region

Model = TypeVar("Model", bound=nnx.Module)
Arrays = TypeVar("Arrays")
MOST_SIMULATED = 512  # devices of one CPU: more take minutes to start
AXES = ("data", "fsdp", "seq", "tensor")
TOKENS = P(("data", "fsdp"), "seq")  # how tokens [B, T] lie on the mesh


def parse_mesh(text: str) -> dict[str, int]:
    """Parses mesh axes such as "data=2,seq=4", in their order; those that are not named come first, with size 1."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{part!r} is no mesh axis: write NAME=SIZE with a name of {AXES}, once each"
            )
        sizes[name] = int(size)
    return {name: 1 for name in AXES if name not in sizes} | sizes


def join(coordinator: str | None, num_processes: int | None, process_index: int | None, timeout: int) -> None:
    """Joins the other processes of a run, as the arguments say, or else the cluster's scheduler.

    If one of them dies, the runtime ends the others after `timeout` seconds.

    Raises:
      ValueError: if neither says who they are.
    """
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_index,
            heartbeat_timeout_seconds=timeout,
            shutdown_timeout_seconds=timeout,
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"--distributed could not join the other processes ({error}): under SLURM, Kubernetes, Open MPI or on a "
            "TPU they are found, elsewhere give --coordinator HOST:PORT, --num-processes and --process-index"
        ) from error


def make_mesh(sizes: dict[str, int] | None, num_processes: int | None = None) -> Mesh:
    """Makes the mesh; CPU devices are simulated, as many as it takes, an equal part of them in each process.

    Raises:
      ValueError: if it does not fit the devices or the processes.
    """
    wanted = math.prod(sizes.values()) if sizes else 8
    if sizes and wanted % (num_processes or 1):
        raise ValueError(f"--mesh {_text(sizes)} has {wanted} devices, which {num_processes} processes cannot share")
    if wanted // (num_processes or 1) > MOST_SIMULATED and jax.default_backend() == "cpu":
        raise ValueError(f"--mesh {_text(sizes or {})} simulates {wanted} devices: ask for {MOST_SIMULATED} at most")
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        with contextlib.suppress(RuntimeError):  # raised if the devices exist already
            jax.config.update("jax_num_cpu_devices", wanted // (num_processes or 1))
    count = jax.device_count()
    if sizes is None:
        sizes = dict.fromkeys(AXES, 1) | {"seq": min(count, 8) if jax.default_backend() == "cpu" else count}
        wanted = sizes["seq"]
    if wanted > count:
        raise ValueError(f"--mesh {_text(sizes)} asks for {wanted} devices, but there are {count}: ask for fewer")
    if wanted < count and jax.process_count() > 1:
        raise ValueError(
            f"--mesh {_text(sizes)} asks for {wanted} of {count} devices, but all of several processes must take part: "
            "ask for all, or start fewer"
        )
    return ringjax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))


def fitting(mesh: Any, spec: P | None, shape: tuple[int, ...]) -> P:
    """Returns a spec without the axes that a mesh lacks, and those that do not divide their dimension of a shape."""

    def fit(axes: Any, size: int) -> Any:
        names = axes if isinstance(axes, tuple) else (axes,)
        names = tuple(name for name in names if name in mesh.axis_names)
        return names if names and size % math.prod(mesh.shape[name] for name in names) == 0 else None

    return P(*map(fit, (spec or ()), shape))


def on_own_tokens(function: Callable[[Any, Any], jax.Array], tokens: tuple[jax.Array, ...], weights: Any) -> jax.Array:
    """Returns what a function makes of tokens [B, T, ...] and weights, on each device of its tokens and all weights."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(tokens, weights)
    spec = fitting(mesh, P(("data", "fsdp"), ("seq", "tensor")), tokens[0].shape)
    # Unchecked, so that a loop over tokens adds up the gradient of the weights before it is summed over devices.
    run = jax.shard_map(function, in_specs=(spec, P()), out_specs=spec, check_vma=False)
    return run(tokens, weights)


def on_all_devices(model: Model, mesh: Mesh | None) -> Model:
    """Returns a model with its parameters on each device of a mesh, if there is one; else every call copies them."""
    definition, state = nnx.split(model)
    return nnx.merge(definition, replicate(state, mesh))


def replicate(arrays: Arrays, mesh: Mesh | None) -> Arrays:
    """Returns arrays on each device of a mesh, if there is one."""
    return arrays if mesh is None else jax.device_put(arrays, NamedSharding(mesh, P()))


def check_fits(mesh: Mesh, sizes: dict[str, tuple[int, tuple[str, ...]]]) -> None:
    """Checks that what is cut over axes divides: to each flag its value and the axes.

    Raises:
      ValueError: naming the flag, its value and the remedy.
    """
    for flag, (value, axes) in sizes.items():
        shards = math.prod(mesh.shape[axis] for axis in axes)
        if value % shards:
            raise ValueError(
                f"{flag} {value} does not divide over {' x '.join(axes)}, {shards} devices: make it a multiple of "
                f"{shards}, or choose another --mesh"
            )


def local_region(mesh: Mesh, shape: tuple[int, int]) -> Region:
    """Returns the rows and the tokens of a batch [B, T] that this process's devices hold.

    Raises:
      ValueError: if these are not a box.
    """
    indices = NamedSharding(mesh, TOKENS).addressable_devices_indices_map(shape).values()
    parts = {
        tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True)) for index in indices if index
    }
    return bounding_box(sorted(parts))


def bounding_box(parts: list[tuple[tuple[int, int], ...]]) -> Region:
    """Returns the box that is filled by parts, each of them given by its first and last row and token.

    Raises:
      ValueError: if they do not fill it.
    """
    first_row, last_row, first_token, last_token = (
        limit(part[axis][end] for part in parts) for axis in (0, 1) for end, limit in ((0, min), (1, max))
    )
    held = sum((rows[1] - rows[0]) * (tokens[1] - tokens[0]) for rows, tokens in parts)
    if held != (last_row - first_row) * (last_token - first_token):
        raise ValueError(
            f"the devices of a process hold {parts} of a batch, which is no box: name the axes of --mesh in "
            "another order"
        )
    return slice(first_row, last_row), slice(first_token, last_token)


def _text(sizes: dict[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())
