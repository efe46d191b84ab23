"""``roomier.prepare``: the engine of the Trainer for custom loops."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roomier
from roomier.plan import plan_from_flags

NUM_STEPS = 6
ON_CPU = {"accelerator": "cpu"}


class Net(nn.Module):
    """Plain module whose forward returns a loss."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(self.dropout(self.hidden(x).relu())), labels)


def batches(count):
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        labels = torch.randint(3, (4,), generator=generator)
        labels[: index % 3] = -100
        found.append({"x": torch.randn(4, 4, generator=generator), "labels": labels})
    return found


def same_bits(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"precision": "16-mixed", "gradient_clip_val": 0.1},
        {"precision": "bf16-true"},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"lr_schedule": {"name": "linear", "warmup_steps": 2}},
    ],
    ids=str,
)
def test_parity_with_the_trainer(tmp_path, flags):
    torch.manual_seed(0)
    model = Net()
    ours = copy.deepcopy(model)
    flags = {**ON_CPU, "optimizer": "adamw", "learning_rate": 1e-2, **flags}
    size = flags.get("accumulate_grad_batches", 1)
    data = batches(NUM_STEPS * size)

    torch.manual_seed(1)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = roomier.Trainer(max_steps=NUM_STEPS, default_root_dir=tmp_path, **quiet, **flags)
    trainer.fit(model, data)

    torch.manual_seed(1)
    engine = roomier.prepare(ours, plan=plan_from_flags(**flags), max_steps=NUM_STEPS)
    for start in range(0, len(data), size):
        loss = engine.forward_backward(lambda batch: ours(**batch), data[start : start + size])
        engine.clip()
        engine.step()
        if engine.scheduler is not None:
            engine.scheduler.step()
    assert same_bits(model, ours)
    assert loss.shape == ()
    assert not loss.requires_grad
    assert float(loss) == float(trainer.run.now.last_loss)


def test_clip_returns_the_norm_before_clipping():
    model = nn.Linear(3, 1)
    engine = roomier.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan_from_flags(**ON_CPU))
    engine.forward_backward(lambda x: model(x).sum(), [torch.tensor([[3.0, 4.0, 0.0]])])
    assert float(engine.clip(1.0)) == pytest.approx(26**0.5)  # the gradients are 3, 4 and 0, and 1 for the bias
    squares = sum(float(p.grad.pow(2).sum()) for p in model.parameters())
    assert squares == pytest.approx(1.0, rel=1e-4)
    assert engine.clip() is None  # the plan has no limit for gradients
    assert engine.clip(0.01, "value") is None
    assert max(float(p.grad.abs().max()) for p in model.parameters()) == pytest.approx(0.01)


LIMIT = 0.01
CLIPS = plan_from_flags(gradient_clip_val=LIMIT, **ON_CPU)


def prepared_sgd(model, plan):
    """SGD with a learning rate of one, so that parameters change by their gradients."""
    return roomier.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), plan=plan)


def moved_by(model, before):
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    return sum(float((a - b).detach().pow(2).sum()) for a, b in pairs) ** 0.5


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_step_clips_as_the_plan_says(precision):
    model = nn.Linear(3, 1)
    engine = prepared_sgd(model, plan_from_flags(gradient_clip_val=LIMIT, precision=precision, **ON_CPU))
    for _ in range(2):
        before = copy.deepcopy(model)
        engine.forward_backward(lambda x: model(x).float().sum() / 2, [torch.ones(1, 3)])
        engine.step()
        assert moved_by(model, before) == pytest.approx(LIMIT, rel=1e-3)


def test_a_clip_before_the_step_replaces_the_plan():
    model = nn.Linear(3, 1)
    engine = prepared_sgd(model, CLIPS)
    for bound, expected in ((0.5, 0.5), (None, LIMIT)):
        before = copy.deepcopy(model)
        engine.forward_backward(lambda x: model(x).sum(), [torch.full((1, 3), 5.0)])
        engine.clip(bound)
        engine.step()
        assert moved_by(model, before) == pytest.approx(expected, rel=1e-3)


def test_a_clip_affects_one_step_only():
    model = nn.Linear(3, 1)
    engine = prepared_sgd(model, CLIPS)
    for clips_itself, expected in ((True, 0.5), (False, LIMIT)):
        before = copy.deepcopy(model)
        engine.forward_backward(lambda x: model(x).sum(), [torch.full((1, 3), 5.0)])
        if clips_itself:
            engine.clip(0.5)
        engine.step()
        assert moved_by(model, before) == pytest.approx(expected, rel=1e-3)


def test_each_of_several_optimizers_is_clipped():
    first, second = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (first, second)]
    engine = roomier.prepare(nn.ModuleList([first, second]), optimizers, plan=CLIPS)
    before = copy.deepcopy([first, second])
    engine.forward_backward(lambda x: (first(x) + second(x)).sum(), [torch.full((1, 3), 5.0)])
    engine.clip(0.5, optimizer=optimizers[0])
    engine.step()
    assert moved_by(first, before[0]) == pytest.approx(0.5, rel=1e-3)
    assert moved_by(second, before[1]) == pytest.approx(LIMIT, rel=1e-3)


def test_a_step_without_a_backward_raises():
    model = nn.Linear(2, 1)
    engine = prepared_sgd(model, plan_from_flags(**ON_CPU))
    with pytest.raises(roomier.TrainingError, match=r"there are no gradients.*engine\.forward_backward"):
        engine.step()
    model(torch.ones(1, 2)).sum().backward()  # a custom backward is sufficient
    engine.step()


@pytest.mark.parametrize("form", ["mapping", "path", "plan"])
def test_all_forms_of_a_plan(tmp_path, form):
    path = tmp_path / "plan.yaml"
    path.write_text(CLIPS.to_yaml())
    model = nn.Linear(3, 1)
    engine = prepared_sgd(model, {"mapping": CLIPS.to_dict(), "path": str(path), "plan": CLIPS}[form])
    before = copy.deepcopy(model)
    engine.forward_backward(lambda x: model(x).sum(), [torch.full((1, 3), 5.0)])
    engine.step()
    assert moved_by(model, before) == pytest.approx(LIMIT, rel=1e-3)


@pytest.mark.parametrize("plan", ["bf16-mixed", 3, {"precison": {}}], ids=repr)
def test_an_invalid_plan_is_rejected(plan):
    with pytest.raises(roomier.PlanError):
        prepared_sgd(nn.Linear(3, 1), plan)


def test_prepare_returns_the_engine_of_the_trainer(tmp_path):
    model = Net()
    engine = roomier.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan_from_flags(**ON_CPU))
    trainer = roomier.Trainer(max_steps=1, default_root_dir=tmp_path, logger=False, optimizer="sgd", **ON_CPU)
    trainer.fit(Net(), batches(1))
    assert isinstance(engine, type(trainer.engine))


def test_gradients_are_not_accumulated_over_steps():
    model = nn.Linear(2, 1)
    engine = roomier.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), plan=plan_from_flags(**ON_CPU))
    for _ in range(3):
        engine.forward_backward(lambda x: model(x).sum(), [torch.ones(1, 2)])
        engine.step()
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_several_optimizers():
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    model = nn.ModuleList([first, second])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]
    engine = roomier.prepare(model, optimizers, plan=plan_from_flags(**ON_CPU))
    before = copy.deepcopy(model)
    engine.forward_backward(lambda x: (first(x) + second(x)).sum(), [torch.ones(1, 2)])
    engine.step(optimizers[0])
    assert same_bits(second, before[1])
    assert not same_bits(first, before[0])
    engine.step(optimizers[1])
    assert not same_bits(second, before[1])


def test_another_engine_loads_the_state():
    """Both engines then take equal steps."""
    model, data = Net().eval(), batches(4)
    plan = plan_from_flags(**ON_CPU)
    engine = roomier.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), plan=plan)
    for batch in data[:3]:
        engine.forward_backward(lambda batch: model(**batch), [batch])
        engine.step()
    other = Net().eval()
    other_engine = roomier.prepare(other, torch.optim.AdamW(other.parameters(), lr=0.1), plan=plan)
    other_engine.load(copy.deepcopy(engine.state()))
    assert same_bits(model, other)
    for net, each in ((model, engine), (other, other_engine)):
        each.forward_backward(lambda batch, net=net: net(**batch), [data[3]])
        each.step()
    assert same_bits(model, other)
    assert set(engine.state()["optimizers"][0]["state"]) == set(dict(model.named_parameters()))


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("text", "must return a tensor"),
        (1.0, "must return a tensor"),
        ({"los": torch.ones((), requires_grad=True)}, "must contain a tensor at 'loss'"),
        ({"loss": 1.0}, "must contain a tensor at 'loss'"),
        (torch.ones(2, requires_grad=True), "must be a scalar"),
        (torch.ones(()), "must depend on a parameter"),
    ],
    ids=str,
)
def test_an_invalid_loss_is_rejected(output, problem):
    model = nn.Linear(2, 1)
    engine = roomier.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan_from_flags(**ON_CPU))
    with pytest.raises(roomier.TrainingError, match=f"(?s)training_step=.*{problem}"):
        engine.forward_backward(lambda batch: output, [1])


def test_exactly_one_source_of_optimizers_is_required():
    model = nn.Linear(2, 1)
    with pytest.raises(roomier.PlanError, match="no optimizer was passed, and the plan names none"):
        roomier.prepare(model)
    with pytest.raises(roomier.PlanError, match="was passed as well"):
        roomier.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan_from_flags(optimizer="adamw", **ON_CPU)
        )
    with pytest.raises(roomier.RoomierError, match=r"must be an nn\.Module"):
        roomier.prepare("model")


def test_a_schedule_requires_the_number_of_steps():
    plan = plan_from_flags(optimizer="adamw", lr_schedule="cosine", **ON_CPU)
    with pytest.raises(roomier.PlanError, match="requires the number of steps"):
        roomier.prepare(nn.Linear(2, 1), plan=plan)
