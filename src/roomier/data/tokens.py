"""Token files: training text of a language model, stored as one long array of integers that is read from disk on
demand.

File layout: a header of 64 bytes (:class:`_TokenHeader`, little endian, padded with zeros), followed by the tokens as
little-endian uint16, or as uint32 if the vocabulary is too large for uint16.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from roomier.core.errors import DataError
from roomier.core.replacing import replacing_path
from roomier.core.untrusted import open_regular, size_of
from roomier.storage.remote_path import RemotePath, path_of

_MAGIC = b"roomtok\0"
_VERSION = 1
_HEADER_BYTES = 64
# magic, version, bytes per token, number of tokens, vocabulary size, end-of-document id or -1
_FIELDS = struct.Struct("<8sIIQQq")
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_REWRITE = "Rewrite the file with roomier.data.write_tokens"

Document = Sequence[int] | NDArray[Any]


class _TokenHeader(NamedTuple):
    token_bytes: int
    num_tokens: int
    vocab_size: int
    end_of_document: int | None

    def pack(self) -> bytes:
        end = -1 if self.end_of_document is None else self.end_of_document
        fields = _FIELDS.pack(_MAGIC, _VERSION, self.token_bytes, self.num_tokens, self.vocab_size, end)
        return fields.ljust(_HEADER_BYTES, b"\0")


def write_tokens(
    path: str | Path, documents: Iterable[Document], *, vocab_size: int, end_of_document: int | None = None
) -> int:
    """Write ``documents`` to a token file, one document after another. ``end_of_document`` follows each document.

    Only one document is in memory at a time. The file is written under a temporary name and renamed, so ``path`` is
    always either the old file or the complete new file.

    Args:
        path: path of the file. Missing folders are created.
        documents: iterable of documents, such as a generator. Each document is a 1-D sequence of token ids in
            ``[0, vocab_size)``.
        vocab_size: number of different ids. A token occupies 2 bytes for a vocabulary of up to 65536 ids, and 4 bytes
            for a larger vocabulary.
        end_of_document: id to write after each document; None for no id.

    Returns:
        The number of tokens in the file.

    Raises:
        DataError: an id or a document is invalid, there are no tokens, or the file cannot be written.

    Example:
        >>> documents = (tokenizer.encode(text) for text in texts)
        >>> write_tokens("train.tok", documents, vocab_size=50257, end_of_document=50256)
        >>> dataset = TokenDataset("train.tok", block_size=1024)
    """
    path = Path(path)
    _check_vocabulary(vocab_size, end_of_document)
    token_bytes = 2 if vocab_size <= 1 << 16 else 4
    end = np.array([] if end_of_document is None else [end_of_document], dtype=_DTYPES[token_bytes]).tobytes()
    num_tokens = 0
    # An OSError in the code that reads the documents does not concern this path, so only writes are converted.
    with ExitStack() as until_replaced:
        with _as_data_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = until_replaced.enter_context(replacing_path(path))
            file = aside.open("wb")
            until_replaced.callback(_close_after_error, file)
            file.write(bytes(_HEADER_BYTES))
        for number, document in enumerate(documents):
            tokens = _checked(document, number, vocab_size).astype(_DTYPES[token_bytes])
            with _as_data_error(path):
                file.write(tokens.tobytes() + end)
            num_tokens += len(tokens) + len(end) // token_bytes
        if not num_tokens:
            raise DataError("documents", documents, "contain no tokens", "Pass at least one document with tokens")
        with _as_data_error(path):
            file.seek(0)
            file.write(_TokenHeader(token_bytes, num_tokens, vocab_size, end_of_document).pack())
            file.close()
            until_replaced.close()
    return num_tokens


def _check_vocabulary(vocab_size: int, end_of_document: int | None) -> None:
    if not isinstance(vocab_size, (int, np.integer)) or not 1 <= vocab_size <= 1 << 32:
        raise DataError(
            "vocab_size", vocab_size, "must be an integer in [1, 2**32]", "Pass the tokenizer's vocabulary size"
        )
    if end_of_document is None:
        return
    if not isinstance(end_of_document, (int, np.integer)) or not 0 <= end_of_document < vocab_size:
        problem = f"must be an id of the vocabulary, which has {vocab_size} ids"
        raise DataError("end_of_document", end_of_document, problem, f"Pass an id in [0, {vocab_size}) or None")


def _checked(document: Document, number: int, vocab_size: int) -> NDArray[Any]:
    field = f"documents[{number}]"
    action = "Pass token ids instead of text, one flat sequence per document"
    try:
        tokens = np.asarray(document)
    except ValueError as error:  # rows of unequal length
        raise DataError(field, document, "must be a flat sequence of integers", action) from error
    if tokens.ndim == 1 and not tokens.size:
        return tokens
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(field, document, "must be a flat sequence of integers", action)
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if wrong.size:
        place = int(wrong[0])
        problem = f"must be an id of the vocabulary, which has {vocab_size} ids"
        action = "Pass the vocab_size of the tokenizer that created the documents, including added tokens"
        raise DataError(f"{field}[{place}]", int(tokens[place]), problem, action)
    return tokens


def _close_after_error(file: BufferedWriter) -> None:
    with suppress(OSError):  # on a full disk, closing the file fails again, and the first error reports the cause
        file.close()


@contextmanager
def _as_data_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise DataError("path", str(path), problem, "Free some space or choose another path") from error


def _read_header(path: Path) -> _TokenHeader:
    try:
        with open_regular(path) as file:
            num_bytes = size_of(file)
            head = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        raise DataError("path", str(path), "does not exist", "Create it with roomier.data.write_tokens") from None
    except OSError as error:
        raise DataError("path", str(path), f"cannot be read: {error.strerror}", "Pass a readable token file") from error
    if not head.startswith(_MAGIC):
        raise DataError("path", str(path), "is not a token file", _REWRITE)
    if len(head) < _HEADER_BYTES:
        raise DataError("path", str(path), f"has an incomplete header of {len(head)} bytes", _REWRITE)
    _, version, token_bytes, num_tokens, vocab_size, end = _FIELDS.unpack_from(head)
    if version != _VERSION:
        problem = f"has format version {version}, but this release supports only version {_VERSION}"
        raise DataError("path", str(path), problem, _REWRITE)
    if token_bytes not in _DTYPES:
        problem = f"has a header with {token_bytes} bytes per token, which must be one of {sorted(_DTYPES)}"
        raise DataError("path", str(path), problem, _REWRITE)
    expected = _HEADER_BYTES + num_tokens * token_bytes
    if num_bytes != expected:
        problem = f"has {num_bytes} bytes, but its header specifies {expected}, so the file was truncated or extended"
        raise DataError("path", str(path), problem, _REWRITE)
    return _TokenHeader(token_bytes, num_tokens, vocab_size, None if end < 0 else end)


class TokenDataset(Dataset[dict[str, Tensor]]):
    """Dataset of fixed-length blocks from a token file, in which documents are packed without padding.

    Item ``i`` begins at token ``i * stride``. All tensors are int64 of shape ``(block_size,)``. The keys of an item
    depend on ``labels``:

    - ``"shifted"``: ``{"input_ids", "targets"}``. ``targets[t]`` is the token after ``input_ids[t]``, for a model that
      compares logits and targets at the same index.
    - ``"same"``: ``{"input_ids", "labels"}`` with two equal tensors, for a model that shifts the labels itself, such as
      Hugging Face's causal models.

    The two modes use different keys, so that a model cannot silently use the wrong kind of labels.

    Tokens after the last complete block are dropped. Each process maps the file into memory on its first read. A file
    in remote storage is not copied: a batch of items is fetched with parallel requests for their bytes.

    Args:
        path: file written by :func:`write_tokens`, or its address, such as ``"s3://bucket/train.tok"``.
        block_size: number of tokens per item.
        stride: distance in tokens between the beginnings of two consecutive items. None means
            ``block_size``, so that each token is read once.
        labels: ``"shifted"`` or ``"same"``.

    Attributes:
        path: path of the file.
        block_size: number of tokens per item.
        stride: distance in tokens between the beginnings of two consecutive items.
        labels: the argument ``labels``.

    Raises:
        DataError: the file does not exist, is not a token file, is truncated, or is shorter than one block.

    Example:
        >>> dataset = TokenDataset("train.tok", block_size=1024)
        >>> loader = DataLoader(dataset, batch_size=8, shuffle=True)
    """

    def __init__(
        self,
        path: str | Path,
        block_size: int,
        *,
        stride: int | None = None,
        labels: Literal["shifted", "same"] = "shifted",
    ) -> None:
        self.path = path_of("path", path, DataError)
        self.block_size = _positive("block_size", block_size)
        self.stride = self.block_size if stride is None else _positive("stride", stride)
        if labels not in ("shifted", "same"):
            raise DataError("labels", labels, "is unknown", "Use 'shifted' or 'same'")
        self.labels = labels
        self._header = _read_header(self.path)
        self._num_read = self.block_size + (labels == "shifted")  # tokens per item
        if self._num_read > self.num_tokens:
            problem = f"requires {self._num_read} tokens, but {self.path} has only {self.num_tokens}"
            action = f"Use at most {max(self.num_tokens - (self._num_read - self.block_size), 0)} or a longer file"
            raise DataError("block_size", block_size, problem, action)
        self._tokens: NDArray[Any] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the file."""
        return self._header.num_tokens

    @property
    def vocab_size(self) -> int:
        """Number of different token ids, as passed to :func:`write_tokens`."""
        return self._header.vocab_size

    @property
    def end_of_document(self) -> int | None:
        """Id of the token after each document; None if the file was written without this token."""
        return self._header.end_of_document

    def __len__(self) -> int:
        return (self.num_tokens - self._num_read) // self.stride + 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return the items at ``indices``, read into one array."""
        dtype = _DTYPES[self._header.token_bytes]
        rows = np.empty((len(indices), self._num_read), dtype=dtype)
        firsts = [self._checked_index(index) * self.stride for index in indices]
        if isinstance(self.path, RemotePath):
            begins = [_HEADER_BYTES + first * dtype.itemsize for first in firsts]
            parts = self.path.read_ranges([(begin, begin + rows.strides[0]) for begin in begins])
            rows[:] = [np.frombuffer(part, dtype) for part in parts]
        else:
            for row, first in zip(rows, firsts, strict=True):
                row[:] = self._mapped()[first : first + self._num_read]
        # Create two copies instead of two views of one array, because a collate function can mask inputs in place.
        inputs = torch.from_numpy(rows[:, : self.block_size].astype(np.int64))
        answers = torch.from_numpy(rows[:, -self.block_size :].astype(np.int64))
        key = "targets" if self.labels == "shifted" else "labels"
        return [{"input_ids": input_ids, key: answer} for input_ids, answer in zip(inputs, answers, strict=True)]

    def _checked_index(self, index: int) -> int:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"index {index} is out of range: {self!r} has {length} items")
        return index % length

    def _mapped(self) -> NDArray[Any]:
        if self._tokens is None:
            with open_regular(self.path) as file:
                dtype = _DTYPES[self._header.token_bytes]
                self._tokens = np.memmap(file, dtype, mode="r", offset=_HEADER_BYTES, shape=(self.num_tokens,))
        return self._tokens

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memmap would copy the complete file to each worker.
        return {**self.__dict__, "_tokens": None}

    def __repr__(self) -> str:
        return f"TokenDataset({str(self.path)!r}, block_size={self.block_size}, stride={self.stride})"


def _positive(field: str, value: int) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise DataError(field, value, "must be a positive integer", "Pass a number of tokens, at least 1")
    return int(value)
