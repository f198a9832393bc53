"""Fine-tunes the slide encoder with a linear head on its output, as Prov-GigaPath's own script does.

AdamW, with a rate that is lower in earlier layers, a warmup and a cosine; one slide at a time, and a step of the
optimizer after several. Slides are padded to few lengths, as each length is a program of its own.
"""

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from parts.checkpoints import Checkpoints
from parts.distribution import on_all_devices, replicate
from parts.slide_encoder import SlideEncoder
from parts.slides import Slide, read_slide

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
    """How to train: passes over all slides, slides for one step of the optimizer, its highest rate, and the seed."""

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
      ValueError: if it is no such table, names a file that there is not, or fewer than two classes.
    """
    if not path.is_file():
        raise ValueError(f"--finetune {path} is no file: give a table of slides and labels")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), set(reader.fieldnames or ())
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"--finetune {path} is no table ({error}): write it as comma-separated values") from error
    if not {"slide", "label"} <= columns:
        raise ValueError(f"--finetune {path} has not the columns slide and label: name them in its first line")
    for number, row in enumerate(rows, 2):
        if not row["slide"] or not row["label"]:
            raise ValueError(f"--finetune {path} has no slide or no label in row {number}: give both")
    paths, labels = [path.parent / row["slide"] for row in rows], [row["label"] for row in rows]
    names = sorted(set(labels))
    if len(names) < 2:
        raise ValueError(f"--finetune {path} has less than two classes: give slides of two at least")
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
    total = settings.epochs * num_slides // settings.accumulate
    warmup = min(num_slides // settings.accumulate, total - 1)
    rate = optax.warmup_cosine_decay_schedule(0, settings.learning_rate, warmup, total, LEAST_RATE)
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
    # All where a step leaves its results, or the second step would be compiled once more.
    mesh = classifier.encoder.mesh
    definition, params = nnx.split(on_all_devices(classifier, mesh))
    optimizer = make_optimizer(params, classifier.encoder.num_layers, len(classes), settings)

    @jax.jit
    def step(params: Any, state: Any, slide: Any, label: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            logits = nnx.merge(definition, params)(*slide, key=key)
            return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, first, seed = replicate(optimizer.init(params), mesh), 0, jax.random.key(settings.seed)
    if checkpoints is not None and checkpoints.step:
        found = checkpoints.restore({"params": params, "opt_state": state})
        params, state, first = found["params"], found["opt_state"], checkpoints.step
        nnx.update(classifier, params)
    for epoch in range(first, settings.epochs):
        order = np.random.default_rng([settings.seed, epoch]).permutation(len(classes))
        for number in order.tolist():
            # The weights are drawn from the seed itself.
            key = jax.random.fold_in(jax.random.fold_in(seed, epoch + 1), number)
            params, state, value = step(params, state, slides[number], jnp.asarray([classes[number]]), key)
            yield float(value)
        nnx.update(classifier, params)
        if checkpoints is not None:
            checkpoints.save(epoch + 1, {"params": params, "opt_state": state})
            checkpoints.wait()


class _Files:
    """Slides that are read when they are asked for."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = paths

    def __getitem__(self, number: int) -> tuple[jax.Array, ...]:
        return pad(read_slide(self.paths[number], "--finetune"))


def check_run(labelled: Labelled, settings: Settings, width: int) -> None:
    """Checks the numbers, and reads all slides once, before anything is written.

    Raises:
      ValueError: naming the option or the slide, and the remedy.
    """
    if len(labelled.classes) * settings.epochs < 2 * settings.accumulate:
        raise ValueError(
            f"--accumulate {settings.accumulate} makes less than two steps of {len(labelled.classes)} slides in "
            f"{settings.epochs} epochs, and the first one warms up: give fewer, or more --epochs"
        )
    if not 0 < settings.learning_rate < math.inf:
        raise ValueError(f"--learning-rate {settings.learning_rate} must be a number above 0")
    if not 0 <= settings.seed < 2**31:
        raise ValueError(f"--seed {settings.seed} must be at least 0 and less than 2^31")
    for path in labelled.paths:
        found = read_slide(path, "--finetune").embeddings.shape[1]
        if found != width:
            raise ValueError(
                f"--finetune {path} has embeddings of width {found}, and the encoder takes {width}: give those of its "
                "own tile encoder"
            )


def run(
    encoder: SlideEncoder, labelled: Labelled, settings: Settings, options: dict[str, Any], folder: Path, resume: Any
) -> None:
    """Fine-tunes on files, with a progress bar, and writes a checkpoint into the folder after each epoch.

    A run is resumed with the same settings, `options` and slides alone.
    """
    check_run(labelled, settings, encoder.patch.in_features)
    classifier = Classifier(encoder, len(labelled.names), nnx.Rngs(settings.seed + 2**31))  # apart from the encoder's
    rows = [f"{path.name} {labelled.names[number]}" for path, number in zip(*labelled[:2], strict=True)]
    configuration = {**settings._asdict(), **options, "table": f"of {len(rows)} slides, {crc32(repr(rows).encode()):x}"}
    slides, count = _Files(labelled.paths), len(rows)
    with Checkpoints(folder, configuration, resume, option="--checkpoints") as checkpoints:
        total, done = settings.epochs * count, checkpoints.step * count
        recent: list[float] = []
        with tqdm(total=total, initial=done, unit="slide", desc="compiling") as bar:
            for value in finetune(classifier, slides, labelled.classes, settings, checkpoints):
                if not math.isfinite(value):
                    raise checkpoints.lost(f"the loss became {value}", "lower --learning-rate")
                recent = [*recent, value][-count:]
                bar.set_description(f"loss {np.mean(recent):.4f}")
                bar.update()
    print(f"{count} slides of {len(labelled.names)} classes; checkpoints are in {folder}")
