"""Real text as documents: whole files of bytes, split by file, packed into sequences, and scored by a bigram table."""

import hashlib
import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parts.byte_model import NGRAMS, features

SEPARATOR = 0  # the byte before and after each document
PADDING = -1
_BEFORE = max(NGRAMS) - 1  # the bytes before a token that it depends on


@dataclass(frozen=True)
class Document:
    """The bytes of a file from `begin` to `stop`, which are read when they are asked for."""

    path: Path
    begin: int
    stop: int

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.stop - self.begin

    def read(self, begin: int, stop: int) -> np.ndarray:
        """Returns the bytes [stop - begin] from `begin` on."""
        return np.fromfile(self.path, np.uint8, stop - begin, offset=self.begin + begin)


Documents = list[Document]
Rows = list[Documents]
Region = tuple[slice, slice]


class Corpus(NamedTuple):
    """The documents to train on, those that are held out, and a digest of the files' names and sizes."""

    train: Documents
    held_out: Documents
    digest: str


class Batch(NamedTuple):
    """Packed documents: tokens [batch, length, 5], the bytes that follow them, and the documents' numbers."""

    inputs: np.ndarray
    targets: np.ndarray
    document_ids: np.ndarray


def load_corpus(source: str | None, sequence_length: int) -> Corpus:
    """Finds the documents of a file, of the files of a folder, or by default of the standard library's own source.

    Each file is a document; one that is longer than a sequence is cut into several. Every tenth file is held out, the
    last of fewer, and of a single file its last tenth.

    Raises:
      ValueError: if there is nothing to read, or less than one sequence of it, or a file that cannot be read, or one
        that is binary.
    """
    files = text_files(source)
    texts = [Document(path, 0, size) for path in files if (size := _size_of_text(path))]
    if len(texts) == 1:
        text, cut = texts[0], texts[0].size * 9 // 10
        parts = [Document(text.path, 0, cut)], [Document(text.path, cut, text.size)]
    else:
        parts = hold_out(texts)
    for name, documents in zip(("train", "held_out"), parts, strict=True):
        size = sum(document.size for document in documents)
        if size <= sequence_length:
            raise ValueError(
                f"the {name} part of {source or 'the standard library'} has {size} bytes, less than a sequence of "
                f"{sequence_length + 1}: give more text with --data, or a smaller --sequence-length"
            )
    names = "\n".join(f"{text.path.name} {text.size}" for text in texts)
    train, held_out = ([part for text in part for part in _cut(text, sequence_length - 1)] for part in parts)
    return Corpus(train, held_out, hashlib.sha256(names.encode()).hexdigest()[:16])


def hold_out(documents: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the documents to train on, and those that are held out: every tenth, or the last of fewer."""
    if len(documents) < 10:
        return documents[:-1], documents[-1:]
    return [document for number, document in enumerate(documents) if number % 10 != 9], documents[9::10]


def training_rows(documents: Documents, step: int, seed: int, shape: tuple[int, int]) -> Rows:
    """Returns the documents of each sequence of a step's batch, drawn from its number, so that a resumed run agrees.

    Documents are drawn by their sizes, and fill each sequence as long as they fit.
    """
    sizes = np.array([document.size for document in documents])
    draws = np.random.default_rng((seed, step)).choice(len(documents), (shape[0], 64), p=sizes / sizes.sum())
    return [_fill([documents[i] for i in row], shape[1]) for row in draws]


def evaluation_rows(documents: Documents, shape: tuple[int, int], limit: int) -> list[Rows]:
    """Returns at most `limit` batches of whole documents, evenly spaced over the text."""
    rows, rest = [], list(documents)
    while rest:
        row = _fill(rest[:64], shape[1])
        rest = [document for document in rest[:64] if document not in row] + rest[64:]
        rows.append(row)
    count = min(limit * shape[0], len(rows))
    chosen = np.linspace(0, len(rows) - 1, num=max(shape[0], count - count % shape[0])).astype(int)
    return [[rows[number] for number in chosen[i : i + shape[0]]] for i in range(0, len(chosen), shape[0])]


def pack(rows: Rows, length: int, region: Region = (slice(None), slice(None))) -> Batch:
    """Returns sequences of these documents, each begun by a separator and followed by one, or a region of them.

    Only what lies in the region is read.
    """
    rows, (first, last, _) = rows[region[0]], region[1].indices(length)
    shape = len(rows), last - first
    nothing = features(np.full(_BEFORE + 1, SEPARATOR, np.uint8))[0]
    inputs = np.tile(nothing, (*shape, 1))  # [batch, length, 5]
    batch = Batch(inputs, np.full(shape, SEPARATOR, np.int32), np.full(shape, PADDING, np.int32))
    for row, documents in enumerate(rows):
        begin = 0  # of the document's tokens: the separator, then its bytes
        for number, document in enumerate(documents):
            stop = begin + document.size + 1
            low, high = max(begin, first), min(stop, last)
            if low < high:
                text = _text(document, low - begin - 1 - _BEFORE, high - begin)
                here = slice(low - first, high - first)
                batch.inputs[row, here], batch.targets[row, here] = features(text[:-1]), text[_BEFORE + 1 :]
                batch.document_ids[row, here] = number
            begin = stop
    return batch


def _text(document: Document, begin: int, stop: int) -> np.ndarray:
    """Returns the bytes of a document from `begin` to `stop`, with separators where it has not begun or is over."""
    text = np.full(stop - begin, SEPARATOR, np.uint8)
    low, high = max(begin, 0), min(stop, document.size)
    if low < high:
        text[low - begin : high - begin] = document.read(low, high)
    return text


def zlib_bits(rows: Iterable[Rows]) -> float:
    """Returns the bits per byte of zlib's best compression of each document by itself."""
    documents = [document for batch in rows for row in batch for document in row]
    sizes = [len(zlib.compress(document.read(0, document.size).tobytes(), 9)) for document in documents]
    return 8 * sum(sizes) / sum(document.size for document in documents)


def bigram_bits(documents: Documents, batches: Iterable[Batch]) -> float:
    """Returns the bits per byte, over the batches, of the table of byte pairs counted in the documents."""
    pairs = np.zeros(256 * 256, np.int64)
    for document in documents:
        text = np.concatenate([[SEPARATOR], document.read(0, document.size), [SEPARATOR]]).astype(np.int64)
        pairs += np.bincount(text[:-1] * 256 + text[1:], minlength=256 * 256)
    counts = pairs.reshape(256, 256) + 0.01
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    return float(np.concatenate([bits[b.inputs[..., 0], b.targets][b.document_ids != PADDING] for b in batches]).mean())


def _cut(text: Document, size: int) -> Documents:
    begins = range(text.begin, text.stop, size)
    return [Document(text.path, begin, min(begin + size, text.stop)) for begin in begins]


def _fill(documents: Documents, length: int) -> Documents:
    """Returns those documents, in order, that still fit into a sequence when it is their turn."""
    chosen = []
    for document in documents:
        if document.size + 1 <= length:
            chosen.append(document)
            length -= document.size + 1
    return chosen


def _size_of_text(path: Path) -> int:
    try:
        with path.open("rb") as file:
            is_binary = SEPARATOR in file.read(8192)
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give --data that you may read") from error
    if is_binary:
        raise ValueError(f"{path} is binary, with bytes of zero, which separate documents: leave it out of --data")
    return size


def text_files(source: str | None) -> list[Path]:
    """Returns a file, the files of a folder, or by default those of the standard library's own source.

    Raises:
      ValueError: if there is no file.
    """
    return _standard_library() if source is None else _files(Path(source))


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = root.rglob("*.py")
    return sorted(path for path in files if not {"site-packages", "dist-packages"} & set(path.parts))


def _files(source: Path) -> list[Path]:
    try:
        files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    except OSError as error:
        raise ValueError(f"--data {source} cannot be read ({error.strerror}): give one that you may read") from error
    if not files:
        raise ValueError(f"--data {source} is no file, and no folder with files: give one of these")
    return files
