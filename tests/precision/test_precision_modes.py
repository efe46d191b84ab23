"""Each precision mode computes the same values as a bare loop with torch's tools."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roomier
from roomier.core.ranks import Ranks
from roomier.engine.facts import Facts
from roomier.engine.optimizers import report_waiting_steps
from roomier.techniques.precision.policy import precision_of

NUM_STEPS = 20
CPU = torch.device("cpu")


class Classifier(roomier.Module):
    def __init__(self, loss_scale=1.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 3))
        self.loss_scale = loss_scale
        self.seen = {}

    def training_step(self, batch, batch_idx):
        x, label = batch
        logits = self.net(x)
        self.seen["input"], self.seen["logits"] = x.dtype, logits.dtype
        return F.cross_entropy(logits.float(), label) * self.loss_scale

    def validation_step(self, batch, batch_idx):
        self.seen["validation"] = self.net(batch[0]).dtype
        self.log("v", 1.0)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Classifier()


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(NUM_STEPS)
    ]


def assert_same_bits(module, other):
    for (name, ours), theirs in zip(module.named_parameters(), other.parameters(), strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name


def test_bf16_mixed_is_a_bare_autocast_loop(make_trainer, module, data):
    bare = copy.deepcopy(module)
    optimizer = bare.configure_optimizers()
    torch.manual_seed(1)
    for index, batch in enumerate(data):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = bare.training_step(batch, index)
        loss.backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 0.1)
        optimizer.step()
    torch.manual_seed(1)
    make_trainer(max_epochs=1, precision="bf16-mixed", gradient_clip_val=0.1).fit(module, data, data[:1])
    assert_same_bits(module, bare)
    assert module.seen == {"input": torch.float32, "logits": torch.bfloat16, "validation": torch.bfloat16}
    assert {p.dtype for p in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_16_mixed_is_a_bare_scaler_loop(make_trainer, module, data, is_fused, clip):
    class Unfused(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    module.__class__ = Classifier if is_fused else Unfused
    bare = copy.deepcopy(module)
    optimizer = bare.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu")
    torch.manual_seed(1)
    for index, batch in enumerate(data):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = bare.training_step(batch, index)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(bare.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    torch.manual_seed(1)
    trainer = make_trainer(max_epochs=1, precision="16-mixed", gradient_clip_val=clip)
    trainer.fit(module, data)
    assert_same_bits(module, bare)
    assert trainer.engine.scaler.factor == scaler.get_scale()
    assert module.seen == {"input": torch.float32, "logits": torch.float16}


@pytest.mark.parametrize("clip", [None, 1.0])
def test_steps_with_infinite_gradients_are_skipped_counted_and_logged(make_trainer, module, data, tmp_path, clip):
    """The loss of two steps is so large that its scaled gradient overflows."""

    class Overflows(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx in (3, 4):
                before.append([p.detach().clone() for p in self.parameters()])
                return loss * 1e6
            if batch_idx == 5:
                before.append([p.detach().clone() for p in self.parameters()])
            return loss

    before = []
    module.__class__ = Overflows
    trainer = make_trainer(max_steps=8, precision="16-mixed", gradient_clip_val=clip, logger=True, log_every_n_steps=4)
    trainer.fit(module, data)
    assert all(torch.equal(a, b) for a, b in zip(before[0], before[2], strict=True))
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert trainer.global_step == 8
    assert float(trainer.engine.scaler.num_skipped) == 2
    assert trainer.engine.scaler.factor == 65536 / 4
    rows = [json.loads(line) for line in (tmp_path / "version_0" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["num_skipped_steps"]) for row in rows] == [(4, 1.0), (8, 2.0)]


def test_a_skipped_first_step_causes_no_warning_about_the_schedule(make_trainer, module, data):
    """torch warns if a scheduler steps before the optimizer. This happens here because of the loss scale."""

    class Scheduled(Classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    module.__class__ = Scheduled
    module.loss_scale = 1e6
    trainer = make_trainer(max_steps=2, precision="16-mixed")
    trainer.fit(module, data)
    assert float(trainer.engine.scaler.num_skipped) == 2


@pytest.mark.parametrize(("mode", "dtype"), [("bf16-true", torch.bfloat16), ("64-true", torch.float64)])
def test_true_modes_convert_weights_and_inputs(make_trainer, module, data, mode, dtype):
    bare = copy.deepcopy(module).to(dtype)
    optimizer = bare.configure_optimizers()
    torch.manual_seed(1)
    for x, label in data:
        optimizer.zero_grad()
        logits = bare.net(x.to(dtype))
        F.cross_entropy(logits.float(), label).backward()
        optimizer.step()
    torch.manual_seed(1)
    trainer = make_trainer(max_epochs=1, precision=mode)
    trainer.fit(module, data, data[:1])
    assert_same_bits(module, bare)
    assert module.seen == {"input": dtype, "logits": dtype, "validation": dtype}
    states = trainer.optimizers[0].state.values()
    assert {state["exp_avg"].dtype for state in states} == {dtype}
    assert module.dtype == dtype


def test_new_tensors_in_a_true_mode_have_its_dtype(make_trainer, module, data):
    made = []

    class Makes(Classifier):
        def training_step(self, batch, batch_idx):
            made.append(torch.zeros(1).dtype)
            return super().training_step(batch, batch_idx)

    module.__class__ = Makes
    make_trainer(max_steps=1, precision="bf16-true").fit(module, data)
    assert made == [torch.bfloat16]
    assert torch.get_default_dtype() == torch.float32


def test_the_default_rounds_nothing(make_trainer, module, data):
    trainer = make_trainer(max_steps=1)
    trainer.fit(module, data)
    assert trainer.precision == "32-true"
    assert module.seen == {"input": torch.float32, "logits": torch.float32}
    assert trainer.plan.precision.matmul == "highest"
    assert not trainer.engine.scaler.is_on


def test_the_matmul_mode_is_set_during_the_fit_and_restored(make_trainer, module, data):
    modes = []

    class Looks(Classifier):
        def training_step(self, batch, batch_idx):
            modes.append(torch.get_float32_matmul_precision())
            return super().training_step(batch, batch_idx)

    module.__class__ = Looks
    before = torch.get_float32_matmul_precision()
    make_trainer(max_steps=1, matmul_precision="high").fit(module, data)
    assert modes == ["high"]
    assert torch.get_float32_matmul_precision() == before

    def fails(batch, batch_idx):
        raise KeyError("broken")

    module.training_step = fails
    with pytest.raises(KeyError):
        make_trainer(max_steps=1, matmul_precision="medium").fit(module, data)
    assert torch.get_float32_matmul_precision() == before


def test_a_mode_that_the_device_does_not_support_is_rejected():
    with pytest.raises(roomier.PlanError, match="precision='64-true': is not supported on mps"):
        precision_of("64-true", torch.device("mps"))


def test_convert_batch_does_not_convert_integers():
    precision = precision_of("bf16-true", CPU)
    batch = precision.convert_batch({"x": torch.zeros(2), "label": torch.zeros(2, dtype=torch.long), "name": "a"})
    assert (batch["x"].dtype, batch["label"].dtype, batch["name"]) == (torch.bfloat16, torch.long, "a")
    same = {"x": torch.zeros(2)}
    assert precision_of("bf16-mixed", CPU).convert_batch(same) is same


def test_an_optimizer_that_waits_for_the_device_is_reported(make_trainer, module, data, capsys):
    class Unfused(Classifier):
        def configure_optimizers(self):
            return torch.optim.RMSprop(self.parameters())

    module.__class__ = Unfused
    make_trainer(max_steps=1, precision="16-mixed").fit(module, data)
    assert "is not fused" not in capsys.readouterr().err, "a CPU does not wait"
    cuda = torch.device("cuda")
    facts = Facts(module, (), cuda, precision_of("16-mixed", cuda), Ranks())
    report_waiting_steps(facts, [torch.optim.AdamW(module.parameters(), fused=True)])
    assert "is not fused" not in capsys.readouterr().err
    report_waiting_steps(facts, [torch.optim.RMSprop(module.parameters())])
    assert "RMSprop is not fused, so in each step, the host waits" in capsys.readouterr().err


def test_accumulation_under_a_loss_scale(make_trainer, module, data):
    """The gradients of all micro-batches have the same scale, and are unscaled once."""
    bare = copy.deepcopy(module)
    optimizer = bare.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu")
    torch.manual_seed(1)
    for start in range(0, 8, 2):
        optimizer.zero_grad()
        for index in (start, start + 1):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = bare.training_step(data[index], index)
            scaler.scale(loss * 0.5).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.manual_seed(1)
    make_trainer(max_steps=4, precision="16-mixed", accumulate_grad_batches=2).fit(module, data)
    assert_same_bits(module, bare)


@pytest.mark.parametrize(("level", "allows_tf32"), [("highest", False), ("high", True)])
def test_convolutions_follow_the_matmul_mode(make_trainer, module, data, level, allows_tf32):
    seen = []
    plain_step = module.training_step

    def looks(batch, batch_idx):
        seen.append(torch.backends.cudnn.allow_tf32)
        return plain_step(batch, batch_idx)

    module.training_step = looks
    before = torch.backends.cudnn.allow_tf32
    make_trainer(max_steps=1, matmul_precision=level).fit(module, data)
    assert seen == [allows_tf32]
    assert torch.backends.cudnn.allow_tf32 == before


def test_two_optimizers_clipped_before_either_steps(make_trainer):
    """Each optimizer is unscaled once, and the scale is updated once for both optimizers."""

    class Pair(roomier.Module):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            loss = (self.a(batch) + self.b(batch)).float().square().mean()
            self.manual_backward(loss)
            for optimizer in (first, second):
                self.clip_gradients(optimizer, 1e6)
            self.norms = [p.grad.norm().item() for p in self.parameters()]
            first.step()
            second.step()
            for optimizer in (first, second):
                optimizer.zero_grad()

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1, fused=True) for part in (self.a, self.b)]

    torch.manual_seed(0)
    module = Pair()
    bare = copy.deepcopy(module)
    batch = torch.randn(4, 2)
    make_trainer(max_steps=2, precision="16-mixed").fit(module, [batch])
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (bare.a(batch) + bare.b(batch)).float().square().mean()
    loss.backward()
    for ours, theirs, norm in zip(module.parameters(), bare.parameters(), module.norms, strict=True):
        assert norm == pytest.approx(theirs.grad.norm().item(), rel=1e-2)
        assert torch.allclose(ours, theirs - 0.1 * theirs.grad, rtol=1e-2, atol=1e-4)


def test_a_loss_that_stays_nan_ends_a_run_with_a_loss_scale(make_trainer, module, data):
    module.loss_scale = float("nan")
    with pytest.raises(roomier.TrainingError, match="loss=nan: is not finite at step 20"):
        make_trainer(max_steps=100, precision="16-mixed", log_every_n_steps=20).fit(module, data)


class Counter(nn.Module):
    """Module that converts a tensor that is not a buffer, as metrics do."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(1)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.total = fn(self.total)
        return self


def test_a_module_converts_its_other_tensors_even_if_its_weights_have_the_dtype():
    module = nn.Sequential(nn.Linear(2, 2).bfloat16(), Counter())
    precision_of("bf16-true", CPU).convert_module(module)
    assert module[1].total.dtype is torch.bfloat16
