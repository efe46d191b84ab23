"""DataModule: everything about the data in one object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roomier.trainer import Trainer


class DataModule:
    """Override what you need; names and order are those of Lightning's ``LightningDataModule``.

    ``prepare_data`` runs on one process (download, tokenize), ``setup`` on each.
    """

    trainer: Trainer | None = None

    def prepare_data(self) -> None: ...
    def setup(self, stage: str) -> None: ...
    def teardown(self, stage: str) -> None: ...

    def train_dataloader(self) -> Any:
        """A list of batches, an iterable of batches, or a ``DataLoader``."""
        return None

    def val_dataloader(self) -> Any:
        """As :meth:`train_dataloader`, or a list or dict of loaders."""
        return None

    def test_dataloader(self) -> Any:
        return None

    def predict_dataloader(self) -> Any:
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the position in the data, which roomier keeps itself."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
