"""Every Trainer keyword whose value has a wrong type or is invalid is rejected when the Trainer is created."""

import inspect
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import roomier
from roomier.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from roomier.core.errors import PlanError, RoomierError
from roomier.trainer.keywords.arguments import FORMER_KEYWORDS

# keyword -> (wrong value, next action), at least one row per keyword
WRONG = {
    "plan": [
        (5, "Pass sections"),
        ({"precsion": {}}, "Did you mean 'precision'?"),
        ({"batch": {"acumulate_grad_batches": 2}}, "Did you mean 'accumulate_grad_batches'?"),
        ("nowhere.yaml", "Pass the path of a YAML or JSON file"),
    ],
    "strategy": [
        (3, "Pass a name in quotes"),
        ("singel", "Did you mean 'single'?"),
        ("dp", "Use strategy='ddp'"),
        ({"name": "zero2", "shards": 2}, "Did you mean 'shard_size'?"),
        ("zero2+offlod", "Did you mean 'offload'?"),
    ],
    "accelerator": [(None, "Pass a name"), ("cudaa", "Did you mean 'cuda'?"), ("hpu", "Use accelerator='cuda'")],
    "devices": [
        ([1, 3], "select the devices with the environment variable CUDA_VISIBLE_DEVICES"),
        (0, "Use 1"),
        ("two", "Pass an integer"),
    ],
    "num_nodes": [(1.5, "Pass an integer"), (0, "Use 1")],
    "precision": [
        ("bf16-mixd", "Did you mean 'bf16-mixed'?"),
        (8, "Pass a name"),
        ("16-true", "Use precision='16-mixed'"),
        ("fp8-mixed", "Use precision='bf16-mixed'"),
    ],
    "matmul_precision": [("hightest", "Did you mean 'highest'?"), (None, "Pass a name")],
    "optimizer": [
        ("adamww", "Did you mean 'adamw'?"),
        (object, "Pass a name"),
        (["adamw"], "a dict with name and options, or return an optimizer from configure_opt"),
        ("lbfgs", "Use optimizer='adamw'"),
        ({"lr": 0.1}, "Set optimizer.name"),
    ],
    "learning_rate": [("fast", "without quotes"), (-1.0, "Use a learning rate such as"), (0.1, "Set optimizer.name")],
    "lr_schedule": [
        ("cosin", "Did you mean 'cosine'?"),
        ("cosine", "Set optimizer.name"),
        ({"name": "cosine", "warmup": 3}, "Did you mean 'warmup_steps'?"),
    ],
    "activation_checkpointing": [
        (2, "Use '6GiB'"),
        ("ful", "Did you mean 'full'?"),
        ("6 parsecs", "such as '6GiB'"),
    ],
    "offload": [(2, "Pass a name"), ("dsk", "Did you mean 'disk'?"), ({"weights": "cpu"}, "parameters")],
    "step_in_backward": [(1, "Pass a name"), ("exactly", "Did you mean 'exact'?")],
    "chunked_loss": [("yes", "Pass True or False"), (0, "Use None, or 1024"), (0.5, "Pass an integer")],
    "attention": [(True, "Pass a name"), ("flsh", "Did you mean 'flash'?")],
    "lora": [("8", "Pass an integer"), (0, "Use a rank such as 8"), ({"r": 8}, "Did you mean 'rank'?")],
    "memory_budget": [("22 apples", "such as '6GiB'"), (0.5, "Pass an integer"), (1000, "such as '22GiB'")],
    "compile": [("yes", "Pass True or False"), ("max-autotune", "Pass True or False")],
    "accumulate_grad_batches": [(0, "Use 1"), ({4: 2}, "Pass an integer"), (2.0, "Pass an integer")],
    "gradient_clip_val": [("1.0", "without quotes"), (-1, "Use None to disable clipping"), (float("nan"), "Use None")],
    "seeding": [("event", "Did you mean 'events'?"), (1, "Pass a name")],
    "gradient_clip_algorithm": [
        (2, "Pass a name"),
        ("nrom", "Did you mean 'norm'?"),
        ("value", "Set gradient_clip_val"),
    ],
    "max_epochs": [(-2, "Use an integer of -1 or more"), (1.5, "Use an integer"), (True, "Use an integer")],
    "min_epochs": [(-1, "Use an integer of 0 or more"), ("1", "Use an integer"), (3, "max_epochs")],
    "max_steps": [(None, "Use an integer"), (-5, "Use an integer of -1 or more"), (1e3, "Use an integer")],
    "min_steps": [(-1, "Use an integer of 0 or more"), (2.0, "Use an integer")],
    "max_time": [
        ("an hour", "Use 'DD:HH:MM:SS'"),
        (timedelta(0), "Use"),
        ({"hour": 1}, "{'hours': 1}"),
        (60, "Use"),
    ],
    "hang_timeout": [
        ("ten minutes", "Use 'DD:HH:MM:SS'"),
        (600, "Use"),
        (timedelta(0), "Use"),
        ("00:01:00:00", "Use '00:00:30:00' or less, or None"),
    ],
    "limit_train_batches": [(1.5, "a float in [0.0, 1.0]"), ("all", "Use an integer"), (-1, "Use an integer of 0")],
    "limit_val_batches": [(1.5, "a float in [0.0, 1.0]"), (True, "Use an integer")],
    "limit_test_batches": [(float("nan"), "a float in [0.0, 1.0]")],
    "limit_predict_batches": [([1], "Use an integer")],
    "overfit_batches": [(-0.1, "a float in [0.0, 1.0]"), ("1", "Use an integer")],
    "fast_dev_run": [(-1, "Use True or a number"), ("yes", "Use True or a number"), (0.5, "Use True or a number")],
    "val_check_interval": [(0, "Use limit_val_batches=0"), (2.5, "a float in [0.0, 1.0]"), ("epoch", "DD:HH:MM:SS")],
    "check_val_every_n_epoch": [(0, "Use 1 or more"), (0.5, "Use an integer"), (None, "Set it to a number of batches")],
    "num_sanity_val_steps": [(-2, "Use an integer of -1 or more"), (0.5, "Use an integer")],
    "reload_dataloaders_every_n_epochs": [(-1, "Use an integer of 0 or more"), (0.5, "Use an integer")],
    "log_every_n_steps": [(0, "Use an integer of 1 or more"), (0.5, "Use an integer")],
    "callbacks": [
        (5, "Pass instances of subclasses of roomier.Callback"),
        ("early_stopping", "Pass instances of subclasses of roomier.Callback"),
        ([roomier.Callback], "Pass Callback(...)"),
    ],
    "logger": [
        ("tensorbord", "Did you mean 'tensorboard'?"),
        (3.5, "Pass True, False, a name"),
        ("neptune", "Use one of: comet"),
    ],
    "auto_lr_find": [(1, "Use True or False"), ("no way", "the name of the attribute")],
    "auto_scale_batch_size": [("max", "'power' or 'binsearch'")],
    "enable_checkpointing": [("no", "Use True or False"), (0, "Use True or False")],
    "enable_progress_bar": [(1, "Use True or False")],
    "enable_plan_table": [("no", "Use True or False")],
    "enable_model_summary": [("full", "Use True or False")],
    "deterministic": [("warm", "Use True, False or 'warn'"), ([True], "Use True, False or 'warn'")],
    "benchmark": [("auto", "Use True or False")],
    "detect_anomaly": [("nan", "Use True or False")],
    "inference_mode": [(None, "Use True or False")],
    "profiler": [("simpl", "Use 'simple', 'advanced', 'pytorch'"), (True, "Use 'simple'")],
    "default_root_dir": [
        (5, "Pass a string or a Path"),
        (b"runs", "Pass a string or a Path"),
        ("a\0b", "Remove the NUL byte"),
        ("s4://bucket/runs", "Did you mean 's3://'?"),
        ("memory://", "Pass an address such as 'memory://bucket/runs'"),
    ],
    "upload_errors": [("ignore", "Use 'warn' or 'raise'")],
}
ROWS = [
    pytest.param(keyword, value, action, id=f"{keyword}-{index}")
    for keyword, rows in WRONG.items()
    for index, (value, action) in enumerate(rows)
]
# The error names a field inside the value of the keyword, or two incompatible keywords.
NAMED_OTHERWISE = {
    "plan": ("plan", "batch"),
    "optimizer": ("optimizer", "optimizer.lr"),
    "lr_schedule": ("lr_schedule",),
    "offload": ("offload", "offload.weights"),
    "check_val_every_n_epoch": ("check_val_every_n_epoch", "val_check_interval"),
}


def test_the_table_has_every_keyword():
    assert set(WRONG) == set(inspect.signature(roomier.Trainer.__init__).parameters) - {"self"}


@pytest.mark.parametrize(("keyword", "value", "action"), ROWS)
def test_every_keyword_is_checked_when_the_trainer_is_created(keyword, value, action, desk, monkeypatch):
    monkeypatch.chdir(desk.root.parent)
    others = {"max_epochs": 2} if keyword == "min_epochs" else {}
    with pytest.raises(RoomierError) as caught:
        roomier.Trainer(**{keyword: value}, **others)
    assert caught.value.field in NAMED_OTHERWISE.get(keyword, (keyword,)), caught.value
    assert f"{caught.value.field}=" in str(caught.value), caught.value
    assert action in str(caught.value), caught.value


def test_former_keywords_are_not_current_and_their_replacements_are():
    known = set(inspect.signature(roomier.Trainer.__init__).parameters)
    assert not known & set(FORMER_KEYWORDS)
    for sentence in FORMER_KEYWORDS.values():
        for name in re.findall(r"(?:^Use |, )(\w+)=", sentence.partition("(")[0]):
            assert name in known, sentence


ROWS_OF_TWO = [
    pytest.param(
        lambda d: d.trainer(max_epoch=3), RoomierError, "max_epoch", "3", "Did you mean 'max_epochs'?", id="a typo"
    ),
    pytest.param(
        lambda d: d.trainer(gpus=2),
        RoomierError,
        "gpus",
        "2",
        "Use accelerator='gpu' and devices=N",
        id="a keyword of an old version of Lightning",
    ),
    pytest.param(
        lambda d: d.trainer(resume_from_checkpoint="last"),
        RoomierError,
        "resume_from_checkpoint",
        "'last'",
        "Pass it to fit: trainer.fit(model, ckpt_path=...)",
        id="a keyword that became an argument of fit",
    ),
    pytest.param(
        lambda d: d.trainer(per_device_train_batch_size=8),
        RoomierError,
        "per_device_train_batch_size",
        "8",
        "Pass batch_size to your DataLoader",
        id="a keyword of another trainer",
    ),
    pytest.param(
        lambda d: d.trainer(zebra=1),
        RoomierError,
        "zebra",
        "1",
        "See help(roomier.Trainer)",
        id="a keyword without a similar name",
    ),
    *[
        pytest.param(act, RoomierError, field, "5", action, id=f"{field} is no argument")
        for act, field, action in [
            (lambda d: d.trainer().fit(d.net(), train_loader=5), "train_loader", "Use train_dataloaders"),
            (lambda d: d.trainer().fit(d.net(), train_dataloader=5), "train_dataloader", "Use train_dataloaders"),
            (lambda d: d.trainer().fit(d.net(), val_dataloader=5), "val_dataloader", "Pass val_dataloaders to fit"),
            (lambda d: d.trainer().fit(d.net(), ckpt_pth=5), "ckpt_pth", "Did you mean 'ckpt_path'?"),
            (lambda d: d.trainer().fit(d.net(), zebra=5), "zebra", "See help(roomier.Trainer.fit)"),
            (lambda d: d.trainer().validate(d.net(), dataloder=5), "dataloder", "Did you mean 'dataloaders'?"),
            (lambda d: d.trainer().test(d.net(), weights_only=5), "weights_only", "save the weights with torch.save"),
            (lambda d: d.trainer().predict(d.net(), return_prediction=5), "return_prediction", "'return_predictions'?"),
            (lambda d: ModelCheckpoint(monitr=5), "monitr", "Did you mean 'monitor'?"),
            (lambda d: ModelCheckpoint(period=5), "period", "Use every_n_epochs"),
            (lambda d: ModelCheckpoint(zebra=5), "zebra", "See help(roomier.callbacks.ModelCheckpoint)"),
            (lambda d: EarlyStopping("loss", patence=5), "patence", "Did you mean 'patience'?"),
            (lambda d: LearningRateMonitor(log_momentm=5), "log_momentm", "Did you mean 'log_momentum'?"),
        ]
    ],
    pytest.param(
        lambda d: roomier.Trainer(d.Net()), RoomierError, "Trainer", "Net", "Pass keywords", id="a model as argument"
    ),
    pytest.param(
        lambda d: roomier.Trainer(plan=roomier.Plan(), precision="bf16-mixed"),
        RoomierError,
        "precision",
        "'bf16-mixed'",
        "Set the value in the plan, or remove plan",
        id="a plan and a keyword of the plan",
    ),
    pytest.param(
        lambda d: d.trainer(max_steps=10, min_steps=20),
        RoomierError,
        "min_steps",
        "20",
        "Lower it, or raise max_steps",
        id="min_steps above max_steps",
    ),
    pytest.param(
        lambda d: d.trainer(optimizer="adamw", learning_rate=1e-3, lr_schedule={"name": "cosine", "warmup_steps": -1}),
        PlanError,
        "lr_schedule.warmup_steps",
        "-1",
        "Use 0 for no warm-up",
        id="a negative warm-up",
    ),
    pytest.param(
        lambda d: d.trainer(accelerator="mps", precision="64-true"),
        PlanError,
        "precision",
        "'64-true'",
        "Use precision='32-true'",
        id="float64 on a device without it",
    ),
    pytest.param(
        lambda d: d.trainer(callbacks=[ModelCheckpoint()], enable_checkpointing=False),
        RoomierError,
        "enable_checkpointing",
        "False",
        "Remove one of the two",
        id="checkpointing off and a ModelCheckpoint",
    ),
    pytest.param(
        lambda d: setattr(d.trainer(), "max_epochs", "five"),
        RoomierError,
        "max_epochs",
        "'five'",
        "Use an integer",
        id="a keyword changed on a Trainer",
    ),
]


@pytest.mark.parametrize(("act", "kind", "field", "received", "action"), ROWS_OF_TWO)
def test_unknown_and_incompatible_keywords_are_rejected(act, kind, field, received, action, refuses):
    refuses(act, kind, field, received, action)


@pytest.mark.parametrize(
    ("text", "field", "received", "action"),
    [
        ("precision: {mode: bf16-mixd}", "precision.mode", "bf16-mixd", "Did you mean 'bf16-mixed'?"),
        ("precision: {modus: 32-true}", "precision", "modus", "Did you mean 'mode'?"),
        ("presicion: {mode: 32-true}", "plan", "presicion", "Did you mean 'precision'?"),
        ("precision: [", "plan", "plan.yaml", "Correct the text"),
        ("batch: 4", "batch", "4", "Pass its fields as a mapping"),
    ],
)
def test_an_invalid_plan_file_is_rejected(text, field, received, action, desk, refuses):
    path = Path(desk.root.parent / "plan.yaml")
    path.write_text(text)
    error = refuses(lambda d: roomier.Trainer(plan=path), PlanError, field, received, action)
    assert str(path) in str(error), "the error names the file"


def test_an_invalid_value_is_reported_one_time():
    with pytest.raises(PlanError) as caught:
        roomier.Trainer(gradient_clip_algorithm="nrom")
    assert str(caught.value) == "gradient_clip_algorithm='nrom': is unknown. Did you mean 'norm'?"


class Plain(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any) -> Any:
        return self.net(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: roomier.Trainer(offload={"optimizer_states": "disk", "buffers": 10**12}), "between 1 and 1024"),
        (lambda: roomier.Plan.from_yaml(5), "5"),
        (lambda: roomier.Plan.from_json(5), "5"),
        (lambda: roomier.Trainer(default_root_dir="x" * 5000), "default_root_dir"),
        (
            lambda: roomier.Trainer(accelerator="cpu").fit(Plain(), [torch.ones(1, 1)], ckpt_path="x" * 5000),
            "ckpt_path",
        ),
    ],
    ids=["buffers", "yaml", "json", "root", "checkpoint"],
)
def test_extreme_values_name_their_argument(
    call: Any, message: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RoomierError, match=message):
        call()
