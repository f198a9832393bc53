"""The version of ptxas, the assembler that compiles kernels for GPUs."""

import functools
import re
import shutil
import subprocess

import jax

from ringjax._pattern.warning import warn_once

# CUDA 12.8.0 to 12.9.0, which miscompile masked kernels: jax refuses to compile its own with them too.
MISCOMPILING = (12, 8), (12, 9, 86)


def obstacle() -> str | None:
    """Returns why ptxas cannot compile masked kernels, None where it can; warns where its version is not known."""
    path = _find()
    version = _version_of(path)
    if version is None:
        if jax.default_backend() == "gpu":
            warn_once(
                "ptxas",
                "the version of ptxas, which compiles kernels for Hopper GPUs, is not known; those of CUDA 12.8.0 to "
                "12.9.0 miscompile masked kernels: see that `ringjax check` finds nothing wrong",
            )
        return None
    if MISCOMPILING[0] <= version < MISCOMPILING[1]:
        found = ".".join(map(str, version))
        return f"{path} of version {found} miscompiles masked kernels: install CUDA 12.9.1 (ptxas 12.9.86) or later"
    return None


def _find() -> str | None:
    """Returns the path of the ptxas that jax names to XLA, else of that on the PATH or where CUDA is installed."""
    root = getattr(getattr(getattr(jax, "_src", None), "lib", None), "cuda_path", None)
    folders = [f"{root}/bin" if root else None, None, "/usr/local/cuda/bin"]  # None is the PATH
    return next(filter(None, (shutil.which("ptxas", path=folder) for folder in folders)), None)


@functools.cache
def _version_of(path: str | None) -> tuple[int, ...] | None:
    if path is None:
        return None
    try:
        printed = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", printed)
    return None if version is None else tuple(map(int, version.groups()))
