"""Uploads that an S3 server refuses, interrupts or delays: what the storage contains, and how the run ends."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from roomier import Trainer
from roomier.callbacks import ModelCheckpoint
from roomier.checkpoint import find_last, list_complete, upload, verify
from roomier.core.errors import CheckpointError
from roomier.storage import sending
from tests.storage.servers import TEMPORARY, Fault, Proxy, Request

pytest.importorskip("s3fs", reason="requires the extra services")
pytestmark = pytest.mark.services

FOLDER = "s3://bucket/runs/version_0/checkpoints"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOMIER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sending, "WAITS_S", [0.1, 0.2])


class _Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(x), y)


def _fit(max_steps: int, root: str = "s3://bucket/runs", ckpt_path: str | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,))), batch_size=4)
    trainer = Trainer(
        max_steps=max_steps,
        learning_rate=0.1,
        optimizer="adamw",
        default_root_dir=root,
        callbacks=[ModelCheckpoint(every_n_train_steps=2, save_top_k=2, monitor="step", mode="max")],
        enable_progress_bar=False,
        accelerator="cpu",
        **options,
    )
    trainer.fit(_Classifier(), data, ckpt_path=ckpt_path)
    return trainer


def test_a_run_whose_last_checkpoint_is_not_uploaded_raises(s3: Proxy) -> None:
    """The error names the local copy and the call that uploads it, and this call succeeds when the storage works."""
    s3.fault_of = lambda request, index: "403" if "step%3D4/" in request.path and request.method == "PUT" else None
    with pytest.raises(CheckpointError, match=r"step=4': was not uploaded .* roomier.checkpoint.upload\('") as caught:
        _fit(4)
    s3.clear()
    assert [path.name for path in map(Path, list_complete(FOLDER))] == ["epoch=0-step=2"]
    source, target = re.findall(r"upload\('(.*)', '(.*)'\)", str(caught.value))[0]
    upload(source, target)
    assert Path(str(find_last("s3://bucket/runs"))).name == "epoch=0-step=4"


@pytest.mark.parametrize("errors", ["warn", "raise"])
def test_upload_errors_decides(errors: str, s3: Proxy) -> None:
    """After a failed upload in the middle of a run, training continues and uploads it later, or ends."""
    s3.fault_of = lambda request, index: "403" if "step%3D2/" in request.path and request.method == "PUT" else None
    if errors == "raise":
        with pytest.raises(CheckpointError, match="step=2': was not uploaded"):
            _fit(40, upload_errors=errors)
        return
    _fit(8, upload_errors=errors)
    assert [path.name for path in map(Path, list_complete(FOLDER))] == ["epoch=0-step=6", "epoch=0-step=8"]


@pytest.mark.parametrize("errors", ["warn", "raise"])
@pytest.mark.parametrize("fault", TEMPORARY)
def test_a_temporary_fault_of_an_upload_is_repaired(fault: Fault, errors: str, s3: Proxy) -> None:
    """The run ends without an error, and each of its checkpoints is complete."""
    s3.fault_of = lambda request, index: fault if index > 9 and index % 7 == 3 else None
    _fit(4, upload_errors=errors)
    assert fault in {each.fault for each in s3.requests if each.method == "PUT"}
    s3.clear()
    assert [path.name for path in map(Path, list_complete(FOLDER))] == ["epoch=0-step=2", "epoch=0-step=4"]
    for path in list_complete(FOLDER):
        verify(path)


def test_uploads_continue_if_a_superseded_checkpoint_cannot_be_listed(s3: Proxy, capsys: Any) -> None:
    """The superseded checkpoint is named in a notice, and all newer checkpoints are in the storage."""
    is_sent: list[bool] = []

    def refuse_the_list(request: Request, index: int) -> Fault | None:
        if request.method == "PUT" and "step%3D6/" in request.path:
            is_sent.append(True)
        is_list = request.method == "GET" and re.search("list-type.*step(%3D|=)2%2F", request.path)
        return "403" if is_sent and is_list else None

    s3.fault_of = refuse_the_list
    _fit(8)
    assert "403" in {each.fault for each in s3.requests}
    s3.clear()
    assert "superseded checkpoint was not removed" in "".join(capsys.readouterr())
    names = [path.name for path in map(Path, list_complete(FOLDER))]
    assert names == ["epoch=0-step=2", "epoch=0-step=6", "epoch=0-step=8"]
