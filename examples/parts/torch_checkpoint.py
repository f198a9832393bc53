"""Fills a model with the arrays of a torch checkpoint, by the names that they have there."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

Model = TypeVar("Model", bound=nnx.Module)
# torch's names of Flax's parameters.
_KINDS = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}


def to_numpy(state_dict: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint, of NumPy's or torch's; narrow floats, which NumPy has not, as float32.

    Raises:
      ValueError: for a tensor that is sparse, quantized or without numbers (of the device "meta"), by its name.
    """

    def read(name: str, array: Any) -> np.ndarray:
        try:
            if hasattr(array, "detach"):
                array = array.detach().cpu()
                array = array.float() if str(array.dtype).startswith(("torch.bfloat16", "torch.float8")) else array
            return np.asarray(array)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            layout = f"{getattr(array, 'layout', '')} {getattr(array, 'dtype', '')} on {getattr(array, 'device', '')}"
            raise ValueError(f"{name} is no dense tensor with numbers ({layout}): save it as one") from error

    return {name: read(name, array) for name, array in state_dict.items()}


def fill(model: Model, arrays: dict[str, np.ndarray], names: Mapping[str, str]) -> Model:
    """Returns the model with the arrays in place of its shapes.

    Args:
      model: the model's shapes, from `nnx.eval_shape`.
      arrays: the checkpoint's; emptied.
      names: the checkpoint's name of each part of the model; with ``{}`` for the number of a layer, where the model has
        the parameters of all layers in one array.

    Raises:
      ValueError: for a name that is missing or unknown, or an array of another shape, by its name.
    """
    definition, abstract = nnx.split(model)
    found = {}
    for path, variable in dict(nnx.to_flat_state(abstract)).items():
        *parts, kind = map(str, path)
        name = f"{names['.'.join(parts)]}.{_KINDS[kind]}" if parts else names[kind]
        value = variable.get_value()
        found[path] = variable.replace(_read(arrays, name, value.shape, value.dtype, is_kernel=kind == "kernel"))
    if arrays:
        raise ValueError(f"the checkpoint has arrays that the model has not: {', '.join(sorted(arrays)[:5])}")
    return nnx.merge(definition, nnx.from_flat_state(found))


def _read(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...], dtype: Any, is_kernel: bool) -> Array:
    """Takes a parameter out of the checkpoint's arrays; those of layers are one, with the layers first.

    Raises:
      ValueError: if there is none, or one of another shape.
    """
    if "{}" not in name:
        return jnp.asarray(_take(arrays, name, shape, is_kernel), dtype)
    layers = [_take(arrays, name.format(number), shape[1:], is_kernel) for number in range(shape[0])]
    return jnp.asarray(np.stack(layers), dtype)


def _take(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...], is_kernel: bool) -> np.ndarray:
    if name not in arrays:
        raise ValueError(f"the checkpoint has no {name}")
    array = arrays.pop(name)
    matrix = array.T if is_kernel else array  # torch has outputs first
    # Heads and their width are two dimensions here and one there: first or last.
    is_turned = matrix.ndim == 2 and matrix.shape[0] != shape[0] and matrix.shape[-1] != shape[-1]
    if array.size != math.prod(shape) or is_turned:
        raise ValueError(f"{name} of the checkpoint has the shape {array.shape}, which cannot be made {shape}")
    return matrix.reshape(shape)
