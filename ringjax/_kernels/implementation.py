"""The choice of an implementation for each branch: the named one, or the first by preference that can serve it."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ringjax._kernels import cudnn
from ringjax._kernels.fused import Fused
from ringjax._kernels.interface import Implementation, Request
from ringjax._kernels.mosaic import MosaicGpu, MosaicTpu, NarrowMosaicTpu
from ringjax._kernels.xla import Xla
from ringjax._pattern.warning import warn, warn_once
from ringjax._schedule.schedule import BranchSchedule, Schedules

ImplementationName = Literal["xla", "cudnn", "mosaic"]

# Each states in `serve` what it cannot serve.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "cudnn": Fused(cudnn),
    "mosaic_tpu_narrow": NarrowMosaicTpu(),
    "mosaic_tpu": MosaicTpu(),
    "mosaic_gpu": MosaicGpu(),
    "xla": Xla(),
}
# The implementations of each name that callers may give, and the name of each implementation.
NAMES = {"cudnn": ("cudnn",), "mosaic": ("mosaic_tpu_narrow", "mosaic_tpu", "mosaic_gpu"), "xla": ("xla",)}
NAME_OF = {own: name for name, several in NAMES.items() for own in several}
# What no device has run yet serves only calls that name it: an implementation, or one of its options.
UNTRIED = {"mosaic_tpu_narrow": None, "mosaic_tpu": None, "mosaic_gpu": "return_max_logit"}


def check_implementation(argument: str, name: Any) -> None:
    """Checks the name of an implementation, or None for the fastest.

    Raises:
      ValueError: naming the argument, its value and the remedy.
    """
    if not (name is None or (isinstance(name, str) and name in NAMES)):
        known = ", ".join(map(repr, NAMES))
        raise ValueError(f"{argument}={name!r} is unknown: use one of {known}, or None for the fastest")


def preference(request: Request) -> tuple[str, ...]:
    """Returns the implementations to try if no name is given, in this order; the last one serves everything."""
    return tuple(name for name in _fastest_first(request) if not _is_untried(name, request))


def _is_untried(name: str, request: Request) -> bool:
    return name in UNTRIED and UNTRIED[name] in (None, *request.needs)


def _fastest_first(request: Request) -> tuple[str, ...]:
    own = NAMES["mosaic"]
    # cuDNN starts threads and takes memory for all rows for each document: with documents, ours come first.
    return (*own, "cudnn", "xla") if "document_ids" in request.needs else ("cudnn", *own, "xla")


def implement(schedules: Schedules, name: str | None, request: Request, with_warning: bool = False) -> Schedules:
    """Returns the schedules with their implementations; warns, if asked to, of faster ones that do not serve.

    Raises:
      ValueError: if the named implementation cannot serve all branches.
    """
    if with_warning and name is None:
        _warn_of_untried(schedules, request)
        if request.unmapped:
            _warn_of_axes(schedules, request)
    chosen = [_choose(schedule, name, request) for schedule in schedules]
    for _, reason in chosen:
        if reason is not None:
            raise ValueError(f"implementation={name!r} cannot serve: {reason}; leave it out for the fastest that can")
    return tuple(prepared for prepared, _ in chosen)


def obstacle(schedules: Schedules, name: str | None, request: Request) -> str | None:
    """Returns why the named implementation cannot serve one of the branches, None where it can serve all."""
    reasons = (_choose(schedule, name, request)[1] for schedule in schedules)
    return next((reason for reason in reasons if reason is not None), None)


def obstacles(schedule: BranchSchedule, request: Request) -> list[tuple[str, str]]:
    """Returns the names preferred to the one that serves a branch, each with the reason that it does not."""
    found = []
    for name in dict.fromkeys(NAME_OF[own] for own in _fastest_first(request)):
        own = _of_platform(NAMES[name], request.platform)[-1]
        reason = _obstacle(request, schedule, own)
        if reason is None and _is_untried(own, request):
            reason = f"no device has run it yet; check it with `ringjax check`, then say implementation={name!r}"
        if reason is None:
            break
        found.append((name, reason))
    return found


def _choose(schedule: BranchSchedule, name: str | None, request: Request) -> tuple[BranchSchedule, str | None]:
    """Returns the schedule with its implementation; if none can serve it, with the last one and the reason."""
    prepared, reason = schedule, None
    for own in preference(request) if name is None else _of_platform(NAMES[name], request.platform):
        prepared, reason = _serve(request, schedule, own)
        if reason is None:
            break
    return prepared, reason


def _of_platform(names: tuple[str, ...], platform: str) -> tuple[str, ...]:
    """Returns the names, those of this platform last: the reason that callers see is that of the last one."""
    return tuple(sorted(names, key=lambda name: IMPLEMENTATIONS[name].platform == platform))


def _serve(request: Request, schedule: BranchSchedule, name: str) -> tuple[BranchSchedule, str | None]:
    own = IMPLEMENTATIONS[name]
    prepared, reason = own.serve(request, schedule)
    dtypes = tuple(array.dtype for array in (request.query, request.key, request.value))
    size = _residual_bytes(own, dtypes, request.value.shape[-1], request.needs_lse)
    return dataclasses.replace(prepared, implementation=name, addition=own.addition, residual_bytes=size), reason


@functools.lru_cache
def _residual_bytes(implementation: Implementation, dtypes: Any, value_width: int, needs_lse: bool) -> int:
    """Returns the bytes that the backward needs for each row of a query head besides the query."""
    out = jax.ShapeDtypeStruct((1, 1, value_width), dtypes[0])
    lse = jax.ShapeDtypeStruct((1, 1), functools.reduce(jnp.promote_types, dtypes, jnp.float32))
    found = jax.eval_shape(implementation.residuals, out, lse, out, lse if needs_lse else None)
    return sum(array.size * array.dtype.itemsize for array in found)


def _obstacle(request: Request, schedule: BranchSchedule, name: str) -> str | None:
    return IMPLEMENTATIONS[name].serve(request, schedule)[1]


def _warn_of_untried(schedules: Schedules, request: Request) -> None:
    """Warns, once, of kernels that would serve if a device had run them."""
    for name in UNTRIED:
        is_here = IMPLEMENTATIONS[name].platform == request.platform and _is_untried(name, request)
        if is_here and any(_obstacle(request, schedule, name) is None for schedule in schedules):
            warn_once(
                "untried kernels",
                f"XLA computes attention on platform {request.platform!r}: there are faster kernels, but no device has "
                f"run them yet; check them with `ringjax check`, then say implementation={NAME_OF[name]!r}",
            )
            return


def _warn_of_axes(schedules: Schedules, request: Request) -> None:
    """Warns if only mesh axes that are not mapped over keep a faster implementation from serving."""
    for name in preference(request):
        for schedule in schedules:
            if _obstacle(request._replace(unmapped=()), schedule, name) is None:
                reason = _obstacle(request, schedule, name)
                if reason is not None:
                    warn(f"attention is computed without a fused kernel: {reason}")
                return
