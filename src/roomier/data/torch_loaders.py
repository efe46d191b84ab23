"""Private names of torch's DataLoader that roomier uses, checked with torch 2.11 and 2.13."""

from typing import Any

from torch.utils.data.dataloader import DataLoader, _MultiProcessingDataLoaderIter


def kept_iterator(loader: object) -> Any:
    """Return the iterator, with its workers, that a DataLoader retains between epochs; None if there is no iterator."""
    return getattr(loader, "_iterator", None) if isinstance(loader, DataLoader) else None


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Make the next iterator of a DataLoader start new workers. Call this function on a copy of a DataLoader, so that
    the copy has separate workers.
    """
    loader._iterator = None


def makes_own_iterator(loader: DataLoader[Any]) -> bool:
    """Return whether the class of the loader wraps torch's iterator, as the loaders of graph libraries do."""
    return type(loader)._get_iterator is not DataLoader._get_iterator


def end_workers(iterator: Any) -> None:
    """Terminate the worker processes of a DataLoader iterator, unless they are persistent."""
    iterator = _of_torch(iterator)
    if isinstance(iterator, _MultiProcessingDataLoaderIter) and not iterator._persistent_workers:
        _shut_down(iterator)


def end_kept_workers(loader: DataLoader[Any]) -> None:
    """Terminate the worker processes and the pinning thread that a DataLoader retains between epochs.

    The next iterator of ``loader`` starts new processes.
    """
    iterator = _of_torch(kept_iterator(loader))
    if hasattr(iterator, "_shutdown_workers"):  # torchdata's StatefulDataLoader has iterators of a different class
        _shut_down(iterator)
        if iterator._persistent_workers:
            forget_iterator(loader)


def _of_torch(iterator: Any) -> Any:
    return getattr(iterator, "iterator", iterator)  # graph libraries wrap torch's iterator


def _shut_down(iterator: Any) -> None:
    iterator._shutdown_workers()
    for worker in iterator._workers:
        if worker.is_alive():  # the signal handler of a worker does not run while the worker runs native code
            worker.kill()
            worker.join()


def has_ended(iterator: Any) -> bool:
    """Return whether ``iterator``, from a DataLoader without workers over an iterable dataset, is exhausted."""
    return bool(getattr(getattr(iterator, "_dataset_fetcher", None), "ended", False))
