"""Models exported to TorchScript, ONNX or torch.export return the same outputs, for any batch size."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roomier import Module, Trainer, checkpoint
from roomier.checkpoint.export.output_file import for_torch, replacing_file
from roomier.checkpoint.export.plain import plain_model
from roomier.checkpoint.export.torch_export import export_torch
from roomier.checkpoint.export.torchscript import export_torchscript
from roomier.checkpoint.lightning import LightningFile
from roomier.core.errors import CheckpointError, RoomierError
from tests.checkpoint.lightning_runs import OwnModule, lightning_module, loader
from tests.export.test_lightning_export import trained_on_ranks
from tests.ranks.pool import RankPool


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # an attribute whose annotation is a string
        self.layer, self.dropout = nn.Linear(4, 3), nn.Dropout(0.5)
        self.frozen = nn.BatchNorm1d(3).eval()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.frozen(self.dropout(self.layer(x)))
        return found


class Branching(Module):
    """Module with a branch that depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return x * 2
        return x - 1


class OneSize(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, 4) + 1


class NoForward(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)


pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.load. is deprecated:DeprecationWarning")
X = torch.linspace(0.1, 1.0, 8).view(2, 4)
LARGER = torch.linspace(-1.0, 1.0, 28).view(7, 4)


def test_scripted_and_traced_modules_return_the_outputs_of_the_module(tmp_path: Path) -> None:
    module = Net()
    module.example_input_array = X

    module.to_torchscript(tmp_path / "scripted.pt")
    traced = module.to_torchscript(tmp_path / "traced.pt", method="trace", example_inputs=X)

    assert module.training
    assert module.dropout.training
    assert not module.frozen.training
    expected = module.eval()(LARGER)
    for found in (torch.jit.load(tmp_path / "scripted.pt"), torch.jit.load(tmp_path / "traced.pt"), traced):
        assert torch.equal(found(LARGER), expected)


def test_fitted_module_is_scripted(make_trainer: Callable[..., Trainer]) -> None:
    module = OwnModule()
    trainer = make_trainer(max_steps=1)
    trainer.fit(module, loader())

    scripted = module.to_torchscript()

    assert torch.equal(scripted(LARGER), module.eval()(LARGER))
    assert module.trainer is trainer
    assert "__annotations__" not in vars(module)


def test_properties_of_module_are_not_compiled() -> None:
    properties = {name for cls in Module.__mro__ for name, each in vars(cls).items() if isinstance(each, property)}

    assert properties - set(Module.__jit_unused_properties__) == set()


def test_script_keeps_branches_and_incorrect_trace_is_rejected(tmp_path: Path) -> None:
    scripted = Branching().to_torchscript(example_inputs=X)
    assert torch.equal(scripted(-X), -X - 1)

    with pytest.raises(RoomierError, match=r"(?s)differs.*test_program_exports.py:\d+ depends on a value.*script"):
        Branching().to_torchscript(tmp_path / "x.pt", method="trace", example_inputs=X)
    assert list(tmp_path.iterdir()) == []


def test_unsupported_torchscript_code_is_reported() -> None:
    class Strange(Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + len(globals())

    with pytest.raises(RoomierError, match=r"cannot be scripted.*globals.*method='trace'"):
        Strange().to_torchscript()
    with pytest.raises(RoomierError, match="method='scrpt'"):
        Net().to_torchscript(method="scrpt")  # type: ignore[arg-type]
    with pytest.raises(RoomierError, match="example_input_array"):
        Net().to_torchscript(method="trace")


def test_exported_program_accepts_any_batch_size(tmp_path: Path) -> None:
    module = Net()

    export_torch(module, tmp_path / "net.pt2", X[:1])

    program = torch.export.load(tmp_path / "net.pt2").module()
    assert torch.equal(program(LARGER), module.eval()(LARGER))


@pytest.mark.parametrize(
    ("module", "problem"),
    [(Branching(), r"one graph for all inputs.*in forward.*torch\.where"), (OneSize(), r"dynamic_shapes=\{\}")],
)
def test_model_without_graph_is_rejected_with_place_and_action(module: Module, problem: str, tmp_path: Path) -> None:
    with pytest.raises(RoomierError, match=problem):
        export_torch(module, tmp_path / "x.pt2", X)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.more
def test_fixed_batch_size(tmp_path: Path) -> None:
    export_torch(OneSize(), tmp_path / "x.pt2", X, dynamic_shapes={})

    assert torch.equal(torch.export.load(tmp_path / "x.pt2").module()(X), X + 1)


@pytest.mark.more
def test_onnx_file_returns_the_outputs_of_the_module_for_any_batch_size(tmp_path: Path) -> None:
    import onnxruntime

    module = Net()
    module.example_input_array = (X,)
    in_memory = BytesIO()

    program = module.to_onnx(tmp_path / "net.onnx", input_names=["features"])
    module.to_onnx(in_memory, {"x": X})

    assert program is not None
    assert module.dropout.training
    assert [each.name for each in tmp_path.iterdir()] == ["net.onnx"]
    expected = module.eval()(LARGER).detach()
    for source, name in ((str(tmp_path / "net.onnx"), "features"), (in_memory.getvalue(), "x")):
        [found] = onnxruntime.InferenceSession(source).run(None, {name: LARGER.numpy()})
        assert torch.allclose(torch.from_numpy(found), expected, atol=1e-6)


@pytest.mark.more
def test_onnx_file_with_different_outputs_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(RoomierError, match=r"differs from the model by .* \(maximum: -1e\+00\)"):
        Net().to_onnx(tmp_path / "x.onnx", X, max_difference=-1.0)
    with pytest.raises(RoomierError, match=r"to onnx.*in forward.*method='script'"):
        Branching().to_onnx(tmp_path / "x.onnx", X)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sample", [X[:, :3], {"y": X}, X.long()])
def test_example_that_forward_rejects_is_reported_before_the_export(tmp_path: Path, sample: Any) -> None:
    message = r"cannot be passed to forward \(.*Pass the arguments of forward\(x\)"
    with pytest.raises(RoomierError, match=f"input_sample.*{message}"):
        Net().to_onnx(tmp_path / "x.onnx", sample)
    with pytest.raises(RoomierError, match=f"sample.*{message}"):
        export_torch(Net(), tmp_path / "x.pt2", sample)
    for method in ("script", "trace"):
        with pytest.raises(RoomierError, match=f"example_inputs.*{message}"):
            Net().to_torchscript(tmp_path / "x.pt", method=method, example_inputs=sample)  # type: ignore[arg-type]

    assert list(tmp_path.iterdir()) == []


@pytest.mark.more
@pytest.mark.slow
def test_onnxruntime_and_buffer_limits_are_reported(tmp_path: Path) -> None:
    with pytest.raises(RoomierError, match=r"onnxruntime cannot run it on the CPU .*Export a copy in float32"):
        Net().bfloat16().to_onnx(tmp_path / "x.onnx", X.bfloat16())
    buffer = BytesIO()
    with pytest.raises(RoomierError, match=r"second file.*name of a file instead"):
        Net().to_onnx(buffer, X, external_data=True)

    assert buffer.getvalue() == b""
    assert list(tmp_path.iterdir()) == []


def test_missing_package_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)

    with pytest.raises(RoomierError, match=r'requires onnxscript.*pip install "roomier\[onnx\]"'):
        Net().to_onnx(None, X)


def test_module_without_forward_is_rejected() -> None:
    for export in (Module.to_onnx, Module.to_torchscript):
        with pytest.raises(RoomierError, match=r"NoForward.*has no forward method"):
            export(NoForward())


@pytest.mark.more
def test_adapters_are_merged_into_exported_weights(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    module = OwnModule(width=16)
    trainer = make_trainer(max_steps=3, lora={"rank": 2, "targets": ["net.0"], "base": "int8"})
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "own")
    module.eval()

    scripted = module.to_torchscript(example_inputs=X, max_difference=1e-2)
    loaded = plain_model(tmp_path / "own", OwnModule)

    assert {name for name, _ in scripted.named_parameters()} == {name for name, _ in OwnModule().named_parameters()}
    assert hasattr(module.net[0], "lora_A")
    assert torch.allclose(loaded(X), scripted(X), atol=1e-6)
    assert torch.allclose(loaded(X), module(X), atol=1e-2)


@pytest.mark.more
def test_compiled_module_is_exported_uncompiled() -> None:
    module = Net()
    module.compile(backend="eager")
    called = module._compiled_call_impl

    traced = module.to_torchscript(method="trace", example_inputs=X)

    assert module._compiled_call_impl is called
    assert torch.equal(traced(LARGER), torch.compile(module, backend="eager").eval().forward(LARGER))


@pytest.mark.more
def test_plain_model_of_a_checkpoint_of_two_ranks(tmp_path: Path, on_ranks: RankPool) -> None:
    on_ranks(2, trained_on_ranks, tmp_path / "own")

    model = plain_model(tmp_path / "own", OwnModule)

    export_torchscript(model, tmp_path / "x.pt")
    assert torch.equal(torch.jit.load(tmp_path / "x.pt")(LARGER), model(LARGER))
    assert model(LARGER).std() > 0


def test_transformers_model_is_created_from_the_configuration_in_its_checkpoint(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    sizes = {"vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    trained = BertModel(BertConfig(**sizes, intermediate_size=4, max_position_embeddings=8)).eval()
    pretrained = {"prefix": "", "config": json.loads(trained.config.to_json_string())}
    checkpoint.save(tmp_path / "c", {"module": trained.state_dict(), "pretrained": pretrained})

    model = plain_model(tmp_path / "c", BertModel)

    tokens = torch.arange(8).view(2, 4)
    assert torch.equal(model(tokens).last_hidden_state, trained(tokens).last_hidden_state)


def test_lightning_module_is_scripted_from_its_checkpoint(tmp_path: Path) -> None:
    module = lightning_module(width=5)
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": {"width": 5}}, tmp_path / "x.ckpt")

    model = plain_model(tmp_path / "x.ckpt", type(module))

    assert torch.equal(export_torchscript(model)(X), module(X))
    assert "_trainer" not in vars(model) or vars(model)["_trainer"] is None


def test_plain_model_of_a_lightning_checkpoint(tmp_path: Path) -> None:
    module = OwnModule(width=5)
    content: dict[str, Any] = {"state_dict": module.state_dict(), "hyper_parameters": {"width": 5}}
    torch.save(content, tmp_path / "x.ckpt")

    assert torch.equal(plain_model(tmp_path / "x.ckpt", OwnModule)(X), module(X))
    assert LightningFile(tmp_path / "x.ckpt").hyperparameters == {"width": 5}
    with pytest.raises(CheckpointError, match=r"does not match the weights of OwnModule.*--model"):
        plain_model(tmp_path / "x.ckpt", OwnModule, {"width": 6})


WITHOUT_SPACE = """
import resource, signal, sys, torch
from pathlib import Path
from roomier.checkpoint.export.torch_export import export_torch
from roomier.checkpoint.export.torchscript import export_torchscript

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
for export, name in ((export_torchscript, "x.pt"), (export_torch, "x.pt2")):
    inputs = {"example_inputs" if name == "x.pt" else "sample": torch.ones(2, 100)}
    try:
        export(torch.nn.Linear(100, 100), Path(sys.argv[1], name), **inputs)
    except ValueError as error:
        print(type(error).__name__, error)
print([path.name for path in Path(sys.argv[1]).iterdir()])
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit_bytes", [100, 30_000])
def test_full_disk_is_reported_without_ending_the_process(tmp_path: Path, limit_bytes: int) -> None:
    command = [sys.executable, "-c", WITHOUT_SPACE, str(tmp_path), str(limit_bytes)]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr[-2000:]
    message = "CheckpointError output='.*': cannot be written (File too large). Free some space.*"
    assert re.search(message.replace("(", r"\(").replace(")", r"\)"), done.stdout)
    assert done.stdout.count("CheckpointError") == 2
    assert done.stdout.endswith("[]\n")


class Full:
    """File on a full disk."""

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_write_error_is_raised_after_torchs_writer(tmp_path: Path) -> None:
    with for_torch(tmp_path / "good") as file:
        torch.save(X, file)
    assert torch.equal(torch.load(tmp_path / "good", weights_only=True), X)

    seen: list[str] = []

    def write_on_a_full_disk() -> None:
        with replacing_file(tmp_path / "full") as target, for_torch(target) as file:
            file._file = Full()
            torch.save(X, file)
            seen.append("no error within")

    with pytest.raises(CheckpointError, match=r"output='.*full': cannot be written \(No space left"):
        write_on_a_full_disk()
    assert seen == ["no error within"], "torch's writer must not receive the error"
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
