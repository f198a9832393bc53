"""Real text as bytes: collected from files, split by file, cut into sequences, and scored by a bigram table."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

SEPARATOR = 0


class Corpus(NamedTuple):
    """The bytes [n] to train on, and those that are held out."""

    train: np.ndarray
    held_out: np.ndarray


def load_corpus(source: str | None, sequence_length: int) -> Corpus:
    """Reads a file, the files of a folder, or by default the standard library's own source.

    Every tenth file is held out; of a single file, its last tenth.

    Raises:
      ValueError: if there is nothing to read, or less than one sequence of it.
    """
    files = _standard_library() if source is None else _files(Path(source))
    texts = [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
    texts = [text for text in texts if len(text)]
    if len(texts) == 1:
        (text,) = texts
        cut = len(text) * 9 // 10
        corpus = Corpus(text[:cut], text[cut:])
    else:
        corpus = Corpus(
            _join([text for i, text in enumerate(texts) if i % 10 != 9]),
            _join(texts[9::10] or texts[-1:]),
        )
    for name, text in corpus._asdict().items():
        if len(text) <= sequence_length:
            raise ValueError(
                f"the {name} part of {source or 'the standard library'} has {len(text)} bytes, less than a sequence of "
                f"{sequence_length + 1}: give more text with --data, or a smaller --sequence-length"
            )
    return corpus


def training_batch(text: np.ndarray, step: int, seed: int, shape: tuple[int, int]) -> np.ndarray:
    """Returns the bytes [batch, length + 1] of a step: drawn from the step's number, so that a resumed run agrees."""
    batch, length = shape
    starts = np.random.default_rng((seed, step)).integers(len(text) - length, size=batch)
    return np.stack([text[start : start + length + 1] for start in starts]).astype(np.int32)


def evaluation_batches(text: np.ndarray, shape: tuple[int, int], limit: int) -> Iterator[np.ndarray]:
    """Yields at most `limit` batches of bytes [batch, length + 1], evenly spaced over the text."""
    batch, length = shape
    count = min(limit * batch, (len(text) - 1) // length)
    starts = np.linspace(0, len(text) - 1 - length, num=max(batch, count - count % batch)).astype(int)
    for i in range(0, len(starts), batch):
        yield np.stack([text[start : start + length + 1] for start in starts[i : i + batch]]).astype(np.int32)


def bigram_bits(text: np.ndarray, batches: Iterator[np.ndarray]) -> float:
    """Returns the bits per byte, over the batches, of the table of byte pairs counted in the text."""
    counts = np.bincount(text[:-1].astype(np.int64) * 256 + text[1:], minlength=256 * 256).reshape(256, 256) + 0.01
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    return float(np.mean([bits[tokens[:, :-1], tokens[:, 1:]].mean() for tokens in batches]))


def _join(texts: list[np.ndarray]) -> np.ndarray:
    separator = np.array([SEPARATOR], np.uint8)
    return np.concatenate([part for text in texts for part in (text, separator)]) if texts else separator[:0]


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = root.rglob("*.py")
    return sorted(path for path in files if not {"site-packages", "dist-packages"} & set(path.parts))


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise ValueError(f"--data {source} is neither a file nor a folder")
    return sorted(path for path in source.rglob("*") if path.is_file())
