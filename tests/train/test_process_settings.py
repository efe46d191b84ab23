"""Process-wide settings apply inside a run and are restored afterwards. The profiler writes its trace."""

import json

import pytest
import torch
from torch import nn

import roomier


class Looks(roomier.Module):
    """Module that stores the results of ``look`` in each step."""

    def __init__(self, look=lambda: None):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.look, self.seen = look, []

    def training_step(self, batch, batch_idx):
        self.seen.append(self.look())
        return self.net(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.look())
        self.output = self.net(batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def data():
    return [torch.ones(1, 1)] * 6


def determinism():
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize(
    ("deterministic", "inside"),
    [(True, (True, False)), ("warn", (True, True)), (False, (False, False)), (None, (False, False))],
)
def test_determinism(make_trainer, data, deterministic, inside):
    before = determinism()
    module = Looks(determinism)
    make_trainer(max_steps=1, deterministic=deterministic).fit(module, data)
    assert module.seen == [inside]
    assert determinism() == before


@pytest.mark.parametrize("before", [(True, False), (True, True)])
def test_determinism_set_by_the_user_is_restored(make_trainer, data, before):
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        kept, changed = Looks(determinism), Looks(determinism)
        make_trainer(max_steps=1).fit(kept, data)
        make_trainer(max_steps=1, deterministic=False).fit(changed, data)
        assert (kept.seen, changed.seen) == ([before], [(False, False)])
        assert determinism() == before
    finally:
        torch.use_deterministic_algorithms(False)


def cudnn():
    return torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled


@pytest.mark.parametrize("benchmark", [True, False])
def test_benchmark_changes_no_other_setting_of_cudnn(make_trainer, data, benchmark):
    before = cudnn()
    torch.backends.cudnn.deterministic = True
    try:
        module = Looks(cudnn)
        make_trainer(max_steps=1, benchmark=benchmark).fit(module, data)
        assert module.seen == [(benchmark, True, before[2])]
        assert cudnn() == (before[0], True, before[2])
    finally:
        torch.backends.cudnn.deterministic = before[1]


def test_settings_are_restored_after_an_error(make_trainer, data):
    def fails():
        raise KeyError("broken")

    before = determinism(), torch.is_anomaly_enabled()
    with pytest.raises(KeyError):
        make_trainer(max_steps=1, deterministic=True, detect_anomaly=True).fit(Looks(fails), data)
    assert (determinism(), torch.is_anomaly_enabled()) == before


def test_detect_anomaly_names_the_operation(make_trainer, data):
    class Roots(Looks):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            return (self.net(batch) * 0).sqrt().sum() * 0  # the gradient of sqrt at 0 is infinite: 0 * inf

    module = Roots(torch.is_anomaly_enabled)
    with pytest.warns(UserWarning, match="SqrtBackward0"), pytest.raises(RuntimeError, match="SqrtBackward0"):
        make_trainer(max_steps=1, detect_anomaly=True).fit(module, data)
    assert module.seen == [True]
    assert not torch.is_anomaly_enabled()


def test_detect_anomaly_trains_without_a_warning(make_trainer, data):
    """pytest turns warnings into errors. A warning about a setting that the user requested is unnecessary."""
    trainer = make_trainer(max_steps=2, detect_anomaly=True)
    trainer.fit(Looks(), data)
    assert trainer.global_step == 2


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
@pytest.mark.parametrize("is_inference", [True, False])
def test_inference_mode(make_trainer, data, verb, is_inference):
    module = Looks(lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
    getattr(make_trainer(inference_mode=is_inference), verb)(module, data[:1])
    assert module.seen == [(is_inference, False)]
    assert module.output.is_inference() is is_inference


def test_profiler_torch_writes_a_trace(make_trainer, data, tmp_path, capfd):
    make_trainer(max_steps=6, profiler="torch", logger=True).fit(Looks(), data)
    [path] = (tmp_path / "version_0" / "profile").iterdir()
    names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
    assert any("aten::linear" in name for name in names)
    assert f"profile written to {path}" in capfd.readouterr().err


def test_profiler_without_a_run_folder_prints_a_notice(make_trainer, data, capfd):
    make_trainer(max_steps=1, profiler="torch").fit(Looks(), data)
    assert "no folder (logger=False or fast_dev_run), so no trace is written" in capfd.readouterr().err


def test_custom_profiler(make_trainer, data):
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    make_trainer(max_steps=2, profiler=profiler).fit(Looks(), data)
    assert any(event.key == "aten::linear" for event in profiler.key_averages())
    assert profiler.step_num == 2


def test_invalid_profiler_is_rejected(make_trainer, data):
    with pytest.raises(roomier.RoomierError, match=r"profiler='simpl'.*torch\.profiler\.profile"):
        make_trainer(max_steps=1, profiler="simpl").fit(Looks(), data)


def test_modes_of_submodules_are_restored_after_a_validation(make_trainer, data):
    """A submodule in evaluation mode stays in evaluation mode."""

    class Frozen(Looks):
        def __init__(self):
            super().__init__(lambda: (self.training, self.frozen.training))
            self.frozen = nn.Dropout()
            self.frozen.eval()

    module = Frozen()
    make_trainer(max_epochs=2).fit(module, data[:1], data[:1])
    assert module.seen == [(False, False), (True, False), (False, False), (True, False), (False, False)]
    assert (module.training, module.frozen.training) == (True, False)
