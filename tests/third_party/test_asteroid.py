"""asteroid: its ``System``, a LightningModule that receives the optimizer, the scheduler and the loaders."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.third_party.side_by_side import SEPARATE, both, largest_difference

pl = pytest.importorskip("pytorch_lightning")
# this optional module imports torchaudio, which PyPI provides only for CUDA
with pytest.MonkeyPatch.context() as patched:
    patched.setitem(sys.modules, "torch_stoi", None)
    pytest.importorskip("asteroid", reason=SEPARATE.format(name="asteroid"))

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def system() -> tuple[Any, dict[str, Any]]:
    from asteroid.engine.system import System
    from asteroid.losses import PITLossWrapper, pairwise_neg_sisdr
    from asteroid.models import ConvTasNet

    model = ConvTasNet(n_src=2, n_filters=16, n_blocks=2, n_repeats=1, bn_chan=8, hid_chan=16, skip_chan=8)
    generator = torch.Generator().manual_seed(0)
    sources = torch.randn(12, 2, 800, generator=generator)
    data = TensorDataset(sources.sum(1), sources)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    loss = PITLossWrapper(pairwise_neg_sisdr, pit_from="pw_mtx")
    loaders = (DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4))
    return System(model, optimizer, loss, *loaders, scheduler=scheduler, config={"a": {"b": None, "c": 3}}), {}


def test_weights_equal_lightnings(tmp_path: Path) -> None:
    (theirs, their_module), (ours, our_module) = both(system, tmp_path, pl, max_epochs=3, logger=True)
    difference = largest_difference(their_module.state_dict(), our_module.state_dict())
    print(f"System: weights differ by {difference:.1e}")
    assert difference <= 1e-6
    torch.testing.assert_close(ours.callback_metrics["val_loss"], theirs.callback_metrics["val_loss"])
    ours.save_checkpoint(tmp_path / "c")
