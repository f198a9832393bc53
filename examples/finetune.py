"""Fine-tunes the slide encoder with a linear head on its output, as Prov-GigaPath's own script does.

AdamW, whose rate falls by a factor from layer to layer, with gradients that are accumulated over slides: one slide in a
step, with a warmup and a cosine. Slides are padded to few lengths, as each length is a program of its own.
"""

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from checkpoints import Checkpoints
from flax import nnx
from slide_encoder import SlideEncoder
from slides import Slide, read_slide
from tqdm import tqdm

LAYER_DECAY = 0.95
WEIGHT_DECAY = 1e-5
LEAST_RATE = 1e-6
_LENGTHS_OF_POWER = 8  # between two powers of two there are so many lengths


class Labelled(NamedTuple):
    """The files of slides, and the class of each among the names of classes."""

    paths: list[Path]
    classes: list[int]
    names: list[str]


class Settings(NamedTuple):
    """How to train: passes over all slides, slides of a step of the optimizer, its highest rate, and the seed."""

    epochs: int
    accumulate: int
    learning_rate: float
    seed: int


class Classifier(nnx.Module):
    """The encoder with a linear head: slides to the logits of their classes."""

    def __init__(self, encoder: SlideEncoder, num_classes: int, rngs: nnx.Rngs):
        self.encoder = encoder
        self.head = nnx.Linear(encoder.norm.num_features, num_classes, rngs=rngs)

    def __call__(self, *slide: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns the logits [B, classes] of slides, as the encoder takes them."""
        _, output = self.encoder(*slide, key=key)
        return self.head(output.astype(jnp.float32))


def read_labels(path: Path) -> Labelled:
    """Reads a table with the columns `slide`, files relative to its folder, and `label`.

    Raises:
      ValueError: if it has not these columns, names a file that there is not, or fewer than two classes.
    """
    if not path.is_file():
        raise ValueError(f"--finetune {path} is no file: give a table of slides and labels")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"slide", "label"} <= rows[0].keys():
        raise ValueError(f"--finetune {path} has not the columns slide and label: name them in its first line")
    paths, labels = [path.parent / row["slide"] for row in rows], [row["label"] for row in rows]
    names = sorted(set(labels))
    if len(names) < 2:
        raise ValueError(f"--finetune {path} has {len(names)} class: give slides of two at least")
    for slide in paths:
        if not slide.is_file():
            raise ValueError(f"--finetune {path} names {slide}, which is no file: correct it")
    return Labelled(paths, [names.index(label) for label in labels], names)


def padded_length(num_tiles: int) -> int:
    """Returns the length to pad so many tiles to: at most an eighth more, for tens of lengths in all."""
    step = max(1, 2 ** int(math.log2(num_tiles)) // _LENGTHS_OF_POWER)
    return -(-num_tiles // step) * step


def pad(slide: Slide) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns one slide as the classifier takes it: padded, with the number of its tiles."""
    count = len(slide.embeddings)
    rows = [(0, padded_length(count) - count), (0, 0)]
    embeddings, coordinates = (jnp.asarray(np.pad(array, rows))[None] for array in slide)
    return embeddings, coordinates, jnp.asarray([count])


def rate_scales(params: Any, num_layers: int) -> Any:
    """Returns what the rate of each parameter is multiplied with: less in earlier layers.

    The original's rule also slows the embedding of tiles, but never finds it by its name; here it is as fast, too.
    """

    def scale(path: Any, variable: jax.Array) -> Any:
        name = jax.tree_util.keystr(path)
        if "cls_token" in name:
            return LAYER_DECAY ** (num_layers + 1)
        if "'layers'" not in name:
            return 1.0
        scales = LAYER_DECAY ** np.arange(num_layers, 0, -1)
        return jnp.asarray(scales.reshape(-1, *[1] * (variable.ndim - 1)), variable.dtype)

    return jax.tree_util.tree_map_with_path(scale, params)


def make_optimizer(params: Any, num_layers: int, num_slides: int, settings: Settings) -> optax.GradientTransformation:
    """Returns AdamW on gradients that are the means over several slides; only kernels decay."""
    of_epoch = max(1, num_slides // settings.accumulate)
    total = max(settings.epochs * num_slides // settings.accumulate, of_epoch + 1)
    rate = optax.warmup_cosine_decay_schedule(0, settings.learning_rate, of_epoch, total, LEAST_RATE)
    is_kernel = lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: "kernel" in jax.tree_util.keystr(path), params
    )
    scales = rate_scales(params, num_layers)
    scaled = optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, scales))
    adam = optax.adamw(rate, weight_decay=WEIGHT_DECAY, mask=is_kernel)
    return optax.MultiSteps(optax.chain(adam, scaled), settings.accumulate).gradient_transformation()


def finetune(
    classifier: Classifier,
    slides: Sequence[tuple[jax.Array, ...]] | Any,
    classes: Sequence[int],
    settings: Settings,
    checkpoints: Checkpoints | None = None,
) -> Iterator[float]:
    """Trains a classifier in place; yields the loss of each slide, in the order that the seed gives each epoch.

    Args:
      classifier: the classifier.
      slides: what `pad` returns of each; anything with an index.
      classes: the class of each slide.
      settings: how to train.
      checkpoints: where the state is written after each epoch, and read from first.
    """
    definition, params = nnx.split(classifier)
    optimizer = make_optimizer(params, len(classifier.encoder.path_rates), len(classes), settings)

    @jax.jit
    def step(params: Any, state: Any, slide: Any, label: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            logits = nnx.merge(definition, params)(*slide, key=key)
            return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, first = optimizer.init(params), 0
    if checkpoints is not None and checkpoints.step:
        found = checkpoints.restore({"params": params, "opt_state": state})
        params, state, first = found["params"], found["opt_state"], checkpoints.step
    for epoch in range(first, settings.epochs):
        order = np.random.default_rng([settings.seed, epoch]).permutation(len(classes))
        for number in order.tolist():
            key = jax.random.key(settings.seed * 2**16 + epoch)
            label = jnp.asarray([classes[number]])
            params, state, value = step(params, state, slides[number], label, jax.random.fold_in(key, number))
            yield float(value)
        nnx.update(classifier, params)
        if checkpoints is not None:
            checkpoints.save(epoch + 1, {"params": params, "opt_state": state})
            checkpoints.wait()


class _Files:
    """Slides that are read when they are asked for."""

    def __init__(self, paths: Sequence[Path], width: int):
        self.paths, self.width = paths, width

    def __getitem__(self, number: int) -> tuple[jax.Array, ...]:
        slide = read_slide(self.paths[number])
        if slide.embeddings.shape[1] != self.width:
            path, found = self.paths[number], slide.embeddings.shape[1]
            raise ValueError(f"{path} has embeddings of width {found}, and the encoder takes {self.width}")
        return pad(slide)


def run(encoder: SlideEncoder, labelled: Labelled, settings: Settings, folder: Path, resume: bool) -> None:
    """Fine-tunes on files, with a progress bar, and writes a checkpoint into the folder after each epoch."""
    classifier = Classifier(encoder, len(labelled.names), nnx.Rngs(settings.seed))
    configuration = {**settings._asdict(), "classes": labelled.names, "slides": len(labelled.classes)}
    slides, count = _Files(labelled.paths, encoder.patch.in_features), len(labelled.classes)
    with Checkpoints(folder, configuration, 0 if resume else None) as checkpoints:
        total, done = settings.epochs * count, checkpoints.step * count
        recent: list[float] = []
        with tqdm(total=total, initial=done, unit="slide", desc="compiling") as bar:
            for value in finetune(classifier, slides, labelled.classes, settings, checkpoints):
                recent = [*recent, value][-count:]
                bar.set_description(f"loss {np.mean(recent):.4f}")
                bar.update()
    print(f"{count} slides of {len(labelled.names)} classes; checkpoints are in {folder}")
