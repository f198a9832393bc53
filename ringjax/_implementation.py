"""Which implementation computes each branch: the one that is named, or the fastest that can."""

import warnings
from typing import Any, Literal

from ringjax import _cudnn, _fused, _xla
from ringjax._fused import Fused
from ringjax._schedule import BranchSchedule

Implementation = Literal["xla", "cudnn"]

IMPLEMENTATIONS: dict[str, Any] = {"xla": _xla, "cudnn": Fused(_cudnn)}
FASTEST = "cudnn"


def implement(
    branches: tuple[BranchSchedule, ...],
    name: str | None,
    arrays: Any,
    platform: str,
    strategy: str,
    unmapped: tuple[str, ...],
    needs: tuple[str, ...] = (),
    has_lse_grad: bool = False,
) -> tuple[BranchSchedule, ...]:
    """Returns the branches with their implementations.

    `unmapped` are the axes of the mesh that shard_map does not map over, `needs` the arguments that need pairs to be
    masked or weighted one by one. `has_lse_grad` says whether the lse may have a gradient.

    Raises:
      ValueError: if the named implementation cannot serve all branches.
    """
    implementation = IMPLEMENTATIONS[name or FASTEST]
    if implementation is _xla:
        return branches
    obstacle = implementation.kernel.obstacle(*arrays, platform, _fused.ALIGNMENT if has_lse_grad else 0)
    if obstacle is None and needs:
        obstacle = f"no fused kernel knows {', '.join(needs)}"
    elif obstacle is None and unmapped:
        # To the compiler's partitioner a kernel is opaque: it would gather what these axes cut.
        obstacle = f"the mesh axes {unmapped} are Auto: say with spec=P(...) what they cut, or make them Explicit"
        if name is None:
            warnings.warn(f"attention is computed without a fused kernel: {obstacle}", stacklevel=3)
    served = []
    for branch in branches:
        fused = branch.in_whole_chunks(name or FASTEST)
        reason = obstacle or _fused.obstacle(fused, strategy)
        if reason and name is not None:
            raise ValueError(f"implementation={name!r} cannot serve: {reason}; leave it out for the fastest that can")
        served.append(branch if reason else fused)
    return tuple(served)
