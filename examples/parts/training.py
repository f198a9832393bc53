"""The training step of the byte model: its state, how that lies on a mesh, and the check that all is finite."""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from parts.byte_model import ByteModel
from parts.corpus import PADDING
from parts.distribution import TOKENS, fitting


class State(NamedTuple):
    """What a checkpoint holds: the parameters and the optimizer's state; the step is the checkpoint's number."""

    params: Any
    opt_state: Any


class Tensors(NamedTuple):
    """What a step computes, in that order, or of each array in it whether it is finite."""

    parameter: Any
    logits: Any
    loss: Any
    gradient: Any
    update: Any


class Trainer(NamedTuple):
    """The compiled functions of a run."""

    init: Callable[[], State]
    step: Callable[..., tuple[State, jax.Array, Tensors | None]]
    held_out: Callable[..., jax.Array]
    abstract: State


def make_trainer(arguments: argparse.Namespace, mesh: Mesh) -> Trainer:
    """Returns the functions that make a state, take a training step, and score held-out text by position.

    A step also returns, with `--debug-nans`, whether each tensor is finite.
    """
    definition = define_model(arguments, TOKENS)
    optimizer = make_optimizer(arguments)

    def init() -> State:
        params = nnx.state(make_model(arguments, TOKENS))
        return State(params, optimizer.init(params))

    shardings = state_shardings(jax.eval_shape(init), mesh)

    def predict(params: Any, inputs: jax.Array, targets: jax.Array, document_ids: jax.Array) -> Any:
        logits = nnx.merge(definition, params)(inputs, document_ids=document_ids)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)  # [B, T]
        return losses, logits

    def forward(params: Any, inputs: jax.Array, targets: jax.Array, document_ids: jax.Array) -> Any:
        losses, logits = predict(params, inputs, targets, document_ids)
        return losses.mean(where=document_ids != PADDING), logits

    def train(state: State, *batch: jax.Array) -> tuple[State, jax.Array, Tensors | None]:
        (loss, logits), grads = jax.value_and_grad(forward, has_aux=True)(state.params, *batch)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        tensors = Tensors(state.params, logits, loss, grads, updates)
        finite = jax.tree.map(lambda array: jnp.isfinite(array).all(), tensors) if arguments.debug_nans else None
        return State(optax.apply_updates(state.params, updates), opt_state), loss, finite

    whole = NamedSharding(mesh, P())
    step = jax.jit(train, donate_argnums=0, out_shardings=(shardings, whole, whole))
    abstract = jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        jax.eval_shape(init),
        shardings,
    )
    held_out = jax.jit(lambda params, *batch: by_position(predict(params, *batch)[0], batch[-1]), out_shardings=whole)
    return Trainer(jax.jit(init, out_shardings=shardings), step, held_out, abstract)


def by_position(losses: jax.Array, document_ids: jax.Array) -> jax.Array:
    """Returns the sums of the losses [B, T] and how many they are, by the position in the document: [2, n].

    A document's first token is at position 1. Column i holds the positions from 2**i up to 2**(i + 1) - 1.
    """
    index = jnp.arange(losses.shape[1])
    begins = jnp.diff(document_ids, axis=1, prepend=PADDING - 1) != 0
    position = index + 1 - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)  # [B, T]
    column = jnp.iinfo(position.dtype).bits - 1 - jax.lax.clz(position)  # log2, rounded down
    columns = jax.nn.one_hot(column, losses.shape[1].bit_length())  # [B, T, n]
    weights = jnp.where(document_ids != PADDING, jnp.stack([losses, jnp.ones_like(losses)]), 0.0)  # [2, B, T]
    return jnp.einsum("cbt,btn->cn", weights, columns, precision="highest")


def make_model(arguments: argparse.Namespace, spec: P | None = None) -> ByteModel:
    """Returns the model; `spec` says how tokens lie on the mesh."""
    return ByteModel(
        width=arguments.width,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        segment_lengths=arguments.segment_lengths,
        dilation_rates=arguments.dilation_rates,
        dtype=jnp.dtype(arguments.dtype),
        ngram_bits=arguments.ngram_bits,
        spec=spec,
        rngs=nnx.Rngs(arguments.seed),
    )


def define_model(arguments: argparse.Namespace, spec: P | None = None) -> Any:
    """Returns the model without its parameters, as `nnx.split` does."""
    return nnx.split(nnx.eval_shape(lambda: make_model(arguments, spec)))[0]


def make_optimizer(arguments: argparse.Namespace) -> optax.GradientTransformation:
    """Returns Muon for the matrices and Adam for the rest."""
    warmup = max(1, arguments.steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(
        0, arguments.learning_rate, warmup, max(arguments.steps, warmup + 1), arguments.learning_rate / 20
    )
    return optax.contrib.muon(schedule, adam_b2=0.98, muon_weight_dimension_numbers=_matrices)


def _matrices(params: Any) -> Any:
    """Says which axes of each kernel are its inputs and its outputs; Muon leaves the rest, None, to Adam."""

    def axes(path: Any, array: jax.Array) -> MuonDimensionNumbers | None:
        name = jax.tree_util.keystr(path)
        if array.ndim < 2 or "'embedding'" in name:
            return None
        if array.ndim == 2:
            return MuonDimensionNumbers(0, 1)
        return MuonDimensionNumbers((0, 1), 2) if "'out'" in name else MuonDimensionNumbers(0, (1, 2))

    return jax.tree_util.tree_map_with_path(axes, params)


def state_shardings(state: State, mesh: Mesh) -> State:
    """Returns how a state lies on the mesh: each array as the metadata of its parameter say, also the optimizer's."""

    def of(node: Any) -> Any:
        spec = node.get_metadata().get("out_sharding") if isinstance(node, nnx.Variable) else None
        return jax.tree.map(lambda array: NamedSharding(mesh, fitting(mesh, spec, array.shape)), node)

    return jax.tree.map(of, state, is_leaf=lambda node: isinstance(node, nnx.Variable))


def first_not_finite(finite: Tensors | None) -> str | None:
    """Returns the name of the first tensor that is not finite, such as "gradient of blocks.0.up.kernel"."""
    for kind, tensors in jax.device_get(finite)._asdict().items() if finite else ():
        for path, is_finite in jax.tree_util.tree_leaves_with_path(tensors):
            if not is_finite:
                parts = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
                name = ".".join(part for part in parts if part not in ("", "value"))
                return f"{kind} of {name}" if name else kind
    return None
