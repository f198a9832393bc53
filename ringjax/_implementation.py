"""Which implementation computes each branch: the one that is named, or the first of a preference that can."""

import dataclasses
import warnings
from typing import Literal

from ringjax import _cudnn
from ringjax._fused import Fused
from ringjax._mosaic import Mosaic
from ringjax._protocol import Implementation, Request
from ringjax._schedule import BranchSchedule
from ringjax._xla import Xla

ImplementationName = Literal["xla", "cudnn", "mosaic"]

# By preference: the last one serves everything, and of the others each says itself what it cannot.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "cudnn": Fused(_cudnn),
    "mosaic": Mosaic(),
    "xla": Xla(),
}


def implement(
    branches: tuple[BranchSchedule, ...], name: str | None, request: Request, with_warning: bool = False
) -> tuple[BranchSchedule, ...]:
    """Returns the branches with their implementations; warns, if asked to, of what hinders faster ones.

    Raises:
      ValueError: if the named implementation cannot serve all branches.
    """
    names = IMPLEMENTATIONS if name is None else (name,)
    if with_warning and name is None and request.unmapped:
        _warn_of_axes(branches, request)
    return tuple(_choose(branch, tuple(names), request) for branch in branches)


def _choose(branch: BranchSchedule, names: tuple[str, ...], request: Request) -> BranchSchedule:
    reason = None
    for name in names:
        prepared = _prepare(request, branch, name)
        reason = IMPLEMENTATIONS[name].obstacle(request, prepared)
        if reason is None:
            return prepared
    raise ValueError(f"implementation={names[-1]!r} cannot serve: {reason}; leave it out for the fastest that can")


def _prepare(request: Request, branch: BranchSchedule, name: str) -> BranchSchedule:
    return dataclasses.replace(IMPLEMENTATIONS[name].prepare(request, branch), implementation=name)


def _warn_of_axes(branches: tuple[BranchSchedule, ...], request: Request) -> None:
    """Warns where nothing but axes that are not mapped over keeps a faster implementation from serving."""
    for name, implementation in IMPLEMENTATIONS.items():
        for branch in branches:
            prepared = _prepare(request, branch, name)
            if implementation.obstacle(request._replace(unmapped=()), prepared) is None:
                reason = implementation.obstacle(request, prepared)
                if reason is not None:
                    warnings.warn(f"attention is computed without a fused kernel: {reason}", stacklevel=5)
                return
