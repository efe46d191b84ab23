"""Streams of the datasets package, torchdata, WebDataset and litdata on several ranks: every sample is read once, also
if a run resumes within an epoch on other numbers of ranks. A stream that cannot resume raises an error before a step.
"""

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import roomier
from roomier.callbacks import ModelCheckpoint
from roomier.data import ShuffleBuffer
from tests.ranks.pool import RankFailed, RankPool

for name in ("datasets", "litdata", "pyarrow", "torchdata", "webdataset"):
    pytest.importorskip(name, reason=f"requires {name}: make test-storage", exc_type=ImportError)

pytestmark = pytest.mark.services

NUM_SAMPLES = 80
NUM_FILES = 8
IN_FILE = NUM_SAMPLES // NUM_FILES


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the numbers 0 to 79 to 8 files in the format of each library."""
    folder = tmp_path_factory.mktemp("streams")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("LITDATA_DISABLE_VERSION_CHECK", "1")
        import litdata
        import pyarrow
        import pyarrow.parquet
        import webdataset

        for number in range(NUM_FILES):
            values = list(range(number * IN_FILE, (number + 1) * IN_FILE))
            pyarrow.parquet.write_table(pyarrow.table({"number": values}), folder / f"{number}.parquet")
            with webdataset.TarWriter(str(folder / f"{number}.tar")) as writer:
                for value in values:
                    writer.write({"__key__": str(value), "txt": str(value)})
        cache = litdata.streaming.Cache(str(folder / "litdata"), chunk_size=IN_FILE)
        for value in range(NUM_SAMPLES):
            cache[value] = value
        cache.done()
        cache.merge()
    return folder


def of_datasets(files: Path, **shuffle: int) -> Any:
    import datasets

    paths = sorted(map(str, files.glob("*.parquet")))
    stream = datasets.load_dataset(
        "parquet", data_files=paths, split="train", streaming=True, cache_dir=str(files / "cache")
    )
    return stream.shuffle(seed=3, **shuffle) if shuffle else stream


def numbers(samples: list[dict[str, int]]) -> Tensor:
    return torch.tensor([each["number"] for each in samples])


def read_by_workers(files: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(of_datasets(files), batch_size=2, num_workers=2, collate_fn=numbers)


def of_nodes(files: Path) -> Any:
    from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper, Prefetcher

    batches = Batcher(IterableWrapper(of_datasets(files)), 2)
    return Loader(Prefetcher(ParallelMapper(batches, numbers, num_workers=2, method="thread"), 4))


def number_of(sample: dict[str, str]) -> int:
    return int(sample["txt"])


def of_webdataset(files: Path, splitter: Any = None, **shuffle: int) -> Any:
    import webdataset

    paths = sorted(map(str, files.glob("*.tar")))
    stream = webdataset.WebDataset(paths, shardshuffle=False, nodesplitter=splitter, empty_check=False)
    stream = stream.decode().map(number_of)
    return stream.shuffle(10, **shuffle) if shuffle else stream


def of_litdata(files: Path, num_workers: int = 0, **marks: bool) -> Any:
    import litdata

    stream = litdata.StreamingDataset(str(files / "litdata"), shuffle=True)
    vars(stream).update(marks)
    return litdata.StreamingDataLoader(stream, batch_size=2, num_workers=num_workers)


RESUMES: dict[str, Callable[[Path], Any]] = {
    "datasets": lambda files: DataLoader(of_datasets(files), batch_size=2, collate_fn=numbers),
    "datasets, shuffled": lambda files: DataLoader(
        of_datasets(files, buffer_size=10), batch_size=2, num_workers=2, collate_fn=numbers
    ),
    "datasets, ShuffleBuffer": lambda files: DataLoader(
        ShuffleBuffer(of_datasets(files), 10), batch_size=2, collate_fn=numbers
    ),
    "torchdata, StatefulDataLoader": read_by_workers,
    "torchdata, nodes": of_nodes,
    "webdataset": lambda files: DataLoader(of_webdataset(files, seed=3), batch_size=2),
    "webdataset, workers": lambda files: DataLoader(of_webdataset(files), batch_size=2, num_workers=2),
    "litdata": lambda files: of_litdata(files, shards_by_rank=False),
    "litdata, workers": lambda files: of_litdata(files, num_workers=2, shards_by_rank=False),
}


def split_datasets(files: Path) -> Any:
    from datasets.distributed import split_dataset_by_node

    dist = torch.distributed
    return DataLoader(
        split_dataset_by_node(of_datasets(files), dist.get_rank(), dist.get_world_size()),
        batch_size=2,
        collate_fn=numbers,
    )


def split_webdataset(files: Path) -> Any:
    import webdataset

    return DataLoader(of_webdataset(files, webdataset.split_by_node), batch_size=2)


SHARDED: dict[str, Callable[[Path], Any]] = {
    "datasets": split_datasets,
    "webdataset": split_webdataset,
    "litdata": lambda files: of_litdata(files, num_workers=2),
}


def before_the_ranks(files: Path) -> Any:
    """Create a stream of litdata as before the process group exists: every process reads the rank 0."""
    os.environ["GLOBAL_RANK"] = "0"
    return of_litdata(files)


def split_nodes(files: Path) -> Any:
    from torch.utils.data import DistributedSampler
    from torchdata.nodes import Batcher, Loader, Mapper, SamplerWrapper

    sampler: DistributedSampler[int] = DistributedSampler(range(NUM_SAMPLES))  # type: ignore[arg-type]
    return Loader(Mapper(Batcher(SamplerWrapper(sampler), 2), torch.tensor))


REJECTED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "created before the ranks": (before_the_ranks, "was created for rank 0 of 2, but this is rank 1 of 2"),
    "a sampler in nodes": (split_nodes, "has different first batches on ranks 0 and 1"),
    "unseeded": (
        lambda files: DataLoader(of_webdataset(files, seed=None), batch_size=2),  # type: ignore[arg-type]
        "has different first batches on ranks 0 and 1",
    ),
}
LOADERS = {"resumes": RESUMES, "sharded": SHARDED, "rejected": {name: make for name, (make, _) in REJECTED.items()}}


class Seen(roomier.Module):
    """Module that writes the epoch and the numbers of each batch to a file."""

    def __init__(self, root: Path, files: Path, kind: str, name: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.root, self.files, self.make = root, files, LOADERS[kind][name]

    def train_dataloader(self) -> Any:
        return self.make(self.files)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with (self.root / f"seen-{self.trainer.global_rank}").open("a") as file:
            file.write(json.dumps([self.trainer.current_epoch, batch.tolist()]) + "\n")
        out: Tensor = self.layer(batch[:, None].float() / 100).square().mean()
        return out

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(root: Path, files: Path, kind: str, name: str, num_ranks: int, max_steps: int, max_epochs: int = 1) -> None:
    warnings.simplefilter("ignore")  # the libraries print warnings, for example about forks and threads
    torch.manual_seed(os.getpid())  # ranks have drawn different numbers before
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    trainer = roomier.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        default_root_dir=root / "runs",
        max_steps=max_steps,
        max_epochs=max_epochs,
        callbacks=[ModelCheckpoint(every_n_train_steps=1) if max_steps > 0 else ModelCheckpoint()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Seen(root, files, kind, name), ckpt_path="last")


def seen(root: Path) -> Counter[tuple[int, int]]:
    """Return how often each number was read in each epoch."""
    lines = [json.loads(line) for path in root.glob("seen-*") for line in path.read_text().splitlines()]
    return Counter((epoch, number) for epoch, batch in lines for number in batch)


@pytest.mark.parametrize("name", RESUMES)
def test_every_sample_is_read_once_if_the_number_of_ranks_changes(
    name: str, files: Path, on_ranks: RankPool, tmp_path: Path
) -> None:
    for num_ranks, max_steps in ((2, 5), (3, 7), (1, 9), (2, -1)):
        on_ranks(num_ranks, train, tmp_path, files, "resumes", name, num_ranks, max_steps, joins=num_ranks > 1)
    assert seen(tmp_path) == {(0, number): 1 for number in range(NUM_SAMPLES)}


@pytest.mark.parametrize("name", SHARDED)
def test_a_stream_that_shards_itself_resumes_on_the_same_ranks(
    name: str, files: Path, on_ranks: RankPool, tmp_path: Path
) -> None:
    on_ranks(2, train, tmp_path, files, "sharded", name, 2, 5)
    before = seen(tmp_path)
    action = "saved with 2 ranks cannot be used with 3 ranks. Resume with 2 ranks or from a checkpoint at the end of"
    with pytest.raises(RankFailed, match=action):
        on_ranks(3, train, tmp_path, files, "sharded", name, 3, -1)
    assert seen(tmp_path) == before
    for max_steps in (8, -1):
        on_ranks(2, train, tmp_path, files, "sharded", name, 2, max_steps)
    assert seen(tmp_path) == {(0, number): 1 for number in range(NUM_SAMPLES)}
    on_ranks(3, train, tmp_path, files, "sharded", name, 3, -1, max_epochs=2)
    of_epoch = {number: count for (epoch, number), count in seen(tmp_path).items() if epoch == 1}
    assert set(of_epoch.values()) == {1}
    assert len(of_epoch) >= 60  # three ranks share 8 files, and an epoch ends with the rank that has only two files


@pytest.mark.parametrize("name", REJECTED)
def test_a_stream_that_would_lose_samples_is_rejected(
    name: str, files: Path, on_ranks: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(RankFailed, match=REJECTED[name][1]):
        on_ranks(2, train, tmp_path, files, "rejected", name, 2, 5)
    assert not seen(tmp_path)
