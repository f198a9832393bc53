"""Slides and checkpoints in files: what is read is checked, and nothing in a file can run code."""

import math
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parts.torch_checkpoint import to_numpy

NAMES = "features", "coords"


class Slide(NamedTuple):
    """A slide: the embeddings of its tiles [T, C], and the coordinates of their corners [T, 2] in pixels."""

    embeddings: np.ndarray
    coordinates: np.ndarray


def read_slide(path: Path, option: str = "--tiles") -> Slide:
    """Reads `features` and `coords` of an .h5, .npz or .pt file, which an option names.

    Raises:
      ValueError: if the file is of another kind, is damaged, or has not these two, of as many tiles.
    """
    arrays = _read(path, option, {".h5": _read_h5, ".npz": _read_npz, ".pt": _read_torch})
    for name in NAMES:
        if name not in arrays:
            raise ValueError(
                f"{option} {path} has no {name}, but {', '.join(arrays) or 'nothing'}: give it 'features' and 'coords'"
            )
    try:
        arrays = to_numpy({name: arrays[name] for name in NAMES})
    except ValueError as error:
        raise ValueError(f"{option} {path}: {error}") from error
    slide = Slide(*(_numbers(array, name, f"{option} {path}") for name, array in arrays.items()))
    if slide.embeddings.ndim != 2 or slide.coordinates.shape != (len(slide.embeddings), 2) or not slide.embeddings.size:
        shapes = slide.embeddings.shape, slide.coordinates.shape
        raise ValueError(
            f"{option} {path} has features and coords of the shapes {shapes}: make them [T, width] and [T, 2]"
        )
    if not all(np.isfinite(array).all() for array in slide):
        raise ValueError(f"{option} {path} has numbers that are not finite: mend them")
    return slide


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a checkpoint, of a .pth, .safetensors or .npz file.

    Raises:
      ValueError: if the file is of another kind, is damaged, or wants to run code.
    """
    readers = {".pth": _read_torch, ".pt": _read_torch, ".safetensors": _read_safetensors, ".npz": _read_npz}
    arrays = _read(path, "--weights", readers)
    model = arrays.get("model")
    try:
        return to_numpy(model if isinstance(model, Mapping) else arrays)
    except ValueError as error:
        raise ValueError(f"--weights {path}: {error}") from error


def synthetic_slide(num_tiles: int, width: int) -> Slide:
    """Returns tiles on a grid, whose embeddings are random."""
    rng = np.random.default_rng(0)
    side = int(np.ceil(np.sqrt(num_tiles)))
    coordinates = np.stack(np.divmod(np.arange(num_tiles), side), axis=-1) * 256.0
    return Slide(rng.normal(size=(num_tiles, width)).astype(np.float32), coordinates.astype(np.float32))


def _numbers(array: np.ndarray, name: str, source: str) -> np.ndarray:
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{source} has {name} of {array.dtype}: give real numbers")
    with np.errstate(over="ignore"):  # what is too large is refused as infinite
        return array.astype(np.float32)


def _read(path: Path, option: str, readers: Mapping[str, Any]) -> Any:
    if path.suffix not in readers:
        raise ValueError(f"{option} {path} is of no known kind: give one of {', '.join(readers)}")
    if not path.is_file():
        raise ValueError(f"{option} {path} is no file: give one")
    try:
        arrays = readers[path.suffix](path)
        if not isinstance(arrays, Mapping):
            raise ValueError("no arrays by name")
        return arrays
    except ImportError as error:
        raise ValueError(f"{option} {path} needs {error.name}: pip install {error.name}") from error
    except pickle.UnpicklingError as error:
        words = "holds more than arrays, which could run code: save a state_dict() alone"
        raise ValueError(f"{option} {path} {words}") from error
    except MemoryError as error:
        raise ValueError(f"{option} {path} says that it holds more than memory has room for: cut it") from error
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(f"{option} {path} cannot be read ({reason[0] if reason else type(error).__name__})") from error


def _read_h5(path: Path) -> dict[str, np.ndarray]:
    import h5py  # noqa: PLC0415  # only where such files are read

    with h5py.File(path) as file:
        found = {name: file[name] for name in NAMES if name in file}
        # The system gives addresses for more than there is, and ends the process when they are used.
        if sum(getattr(array, "nbytes", 0) for array in found.values()) > _memory():
            raise MemoryError
        return {name: np.asarray(array) for name, array in found.items()}


def _memory() -> float:
    """Returns the bytes of this machine's memory, as far as it says."""
    if not hasattr(os, "sysconf"):
        return math.inf
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(path):
        raise ValueError("no arrays by name")
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _read_torch(path: Path) -> Any:
    import torch  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    # No object of a class: what a file could run is refused.
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.numpy import load_file  # noqa: PLC0415

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
