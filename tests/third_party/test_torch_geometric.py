"""PyTorch Geometric: LightningDataset and LightningNodeData, unmodified."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.third_party.side_by_side import SEPARATE, both, largest_difference, pl

geometric = pytest.importorskip("torch_geometric", reason=SEPARATE.format(name="torch_geometric"))

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def graphs(number: int, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        size = int(torch.randint(4, 9, (1,), generator=generator))
        x, first = torch.randn(size, 3, generator=generator), torch.arange(size)
        then = (first + 1) % size
        edges = torch.stack([torch.cat([first, then]), torch.cat([then, first])])
        found.append(geometric.data.Data(x=x, edge_index=edges, y=x.sum().view(1)))
    return found


class OfGraphs(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = geometric.nn.GCNConv(3, 16), torch.nn.Linear(16, 1)

    def loss(self, data: Any) -> Any:
        x = functional.relu(self.first(data.x, data.edge_index))
        return functional.mse_loss(self.last(geometric.nn.global_mean_pool(x, data.batch)).squeeze(-1), data.y)

    def training_step(self, data: Any, batch_idx: int) -> Any:
        return self.loss(data)

    def validation_step(self, data: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(data), batch_size=data.num_graphs)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class OfNodes(OfGraphs):
    def loss(self, data: Any) -> Any:
        outputs = self.last(functional.relu(self.first(data.x, data.edge_index))).squeeze(-1)
        return functional.mse_loss(outputs[data.train_mask], data.y[data.train_mask])

    def validation_step(self, data: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(data), batch_size=1)


def data_of_graphs() -> tuple[Any, dict[str, Any]]:
    kinds = geometric.data.lightning
    data = kinds.LightningDataset(graphs(64, 0), graphs(20, 1), batch_size=8, num_workers=0)
    return OfGraphs(), {"datamodule": data}


def data_of_nodes() -> tuple[Any, dict[str, Any]]:
    kinds = geometric.data.lightning
    x, edges = torch.randn(60, 3), torch.randint(0, 60, (2, 200))
    masks = {"train_mask": torch.arange(60) < 40, "val_mask": torch.arange(60) >= 40}
    graph = geometric.data.Data(x=x, edge_index=edges, y=x.sum(1), **masks)
    return OfNodes(), {"datamodule": kinds.LightningNodeData(graph, loader="full", num_workers=0)}


@pytest.mark.parametrize("make", [data_of_graphs, data_of_nodes])
def test_weights_equal_lightnings(make: Any, tmp_path: Path) -> None:
    (peer, other), (trainer, own) = both(make, tmp_path, max_epochs=3)
    assert trainer.global_step == peer.global_step > 0
    assert largest_difference(own.state_dict(), other.state_dict()) <= 1e-6
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(float(peer.callback_metrics["val_loss"]))
