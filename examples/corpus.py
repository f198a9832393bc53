"""Real text as documents: whole files of bytes, split by file, packed into sequences, and scored by a bigram table."""

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

SEPARATOR = 0  # the byte before and after each document
PADDING = -1

Documents = list[np.ndarray]


class Corpus(NamedTuple):
    """The documents to train on, and those that are held out: bytes [n] of each."""

    train: Documents
    held_out: Documents


class Batch(NamedTuple):
    """Packed documents [batch, length]: bytes, the bytes that follow them, and the documents' numbers."""

    inputs: np.ndarray
    targets: np.ndarray
    document_ids: np.ndarray


def load_corpus(source: str | None, sequence_length: int) -> Corpus:
    """Reads a file, the files of a folder, or by default the standard library's own source.

    Each file is a document; one that is longer than a sequence is cut into several. Every tenth file is held out; of a
    single file, its last tenth.

    Raises:
      ValueError: if there is nothing to read, or less than one sequence of it.
    """
    files = _standard_library() if source is None else _files(Path(source))
    texts = [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
    texts = [text for text in texts if len(text)]
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        corpus = Corpus([texts[0][:cut]], [texts[0][cut:]])
    else:
        corpus = Corpus([text for i, text in enumerate(texts) if i % 10 != 9], texts[9::10] or texts[-1:])
    for name, documents in corpus._asdict().items():
        size = sum(map(len, documents))
        if size <= sequence_length:
            raise ValueError(
                f"the {name} part of {source or 'the standard library'} has {size} bytes, less than a sequence of "
                f"{sequence_length + 1}: give more text with --data, or a smaller --sequence-length"
            )
    return Corpus(*([part for text in texts for part in _cut(text, sequence_length - 1)] for texts in corpus))


def training_batch(documents: Documents, step: int, seed: int, shape: tuple[int, int]) -> Batch:
    """Returns the batch of a step, drawn from its number, so that a resumed run agrees.

    Documents are drawn by their sizes, and fill each sequence as long as they fit.
    """
    sizes = np.array(list(map(len, documents)))
    draws = np.random.default_rng((seed, step)).choice(len(documents), (shape[0], 64), p=sizes / sizes.sum())
    return pack([_fill([documents[i] for i in row], shape[1]) for row in draws], shape[1])


def evaluation_batches(documents: Documents, shape: tuple[int, int], limit: int) -> Iterator[Batch]:
    """Yields at most `limit` batches of whole documents, evenly spaced over the text."""
    rows, rest = [], list(documents)
    while rest:
        row = _fill(rest[:64], shape[1])
        taken = set(map(id, row))
        rest = [document for document in rest[:64] if id(document) not in taken] + rest[64:]
        rows.append(row)
    count = min(limit * shape[0], len(rows))
    chosen = np.linspace(0, len(rows) - 1, num=max(shape[0], count - count % shape[0])).astype(int)
    for i in range(0, len(chosen), shape[0]):
        yield pack([rows[number] for number in chosen[i : i + shape[0]]], shape[1])


def pack(rows: list[Documents], length: int) -> Batch:
    """Returns sequences of these documents: each begins after a separator and ends before one."""
    batch = Batch(*(np.full((len(rows), length), fill, np.int32) for fill in (SEPARATOR, SEPARATOR, PADDING)))
    for row, documents in enumerate(rows):
        begin = 0
        for number, document in enumerate(documents):
            stop = begin + len(document) + 1
            batch.inputs[row, begin + 1 : stop] = batch.targets[row, begin : stop - 1] = document
            batch.document_ids[row, begin:stop] = number
            begin = stop
    return batch


def bigram_bits(documents: Documents, batches: Iterable[Batch]) -> float:
    """Returns the bits per byte, over the batches, of the table of byte pairs counted in the documents."""
    pairs = np.zeros(256 * 256, np.int64)
    for document in documents:
        text = np.concatenate([[SEPARATOR], document, [SEPARATOR]]).astype(np.int64)
        pairs += np.bincount(text[:-1] * 256 + text[1:], minlength=256 * 256)
    counts = pairs.reshape(256, 256) + 0.01
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    return float(np.concatenate([bits[b.inputs, b.targets][b.document_ids != PADDING] for b in batches]).mean())


def _cut(text: np.ndarray, size: int) -> Documents:
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


def _fill(documents: Documents, length: int) -> Documents:
    """Returns those documents, in order, that still fit into a sequence when it is their turn."""
    chosen = []
    for document in documents:
        if len(document) + 1 <= length:
            chosen.append(document)
            length -= len(document) + 1
    return chosen


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
