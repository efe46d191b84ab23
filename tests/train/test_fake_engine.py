"""The loop uses only the Engine protocol: an engine that is defined in this test trains, validates and saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import roomier
from roomier import checkpoint
from roomier.api.engine import Engine, Step, StepHooks
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.facts import Facts
from roomier.engine.optimizers import ConfigureOptimizers
from roomier.plan import Plan
from roomier.run.loaders import RunLoaders
from roomier.run.options import LoopOptions
from roomier.run.settled import Request, Settled
from roomier.run.states import RunningStage, TrainerState
from roomier.techniques.optim.configured import Configured
from roomier.techniques.precision.scaler import LossScaler
from roomier.train.fit import fit
from roomier.train.opening.open_run import open_run, restore_run
from roomier.train.saving.save import save_checkpoint
from roomier.train.settling.settle import settle


class FakeEngine:
    """Engine that runs plain SGD without a plan."""

    allows_inference_mode, trace = True, 0
    blocks: Sequence[nn.Module] = ()

    def __init__(self, module: nn.Module) -> None:
        self.module, self.device, self.hooks = module, torch.device("cpu"), StepHooks()
        self.optimizers: list[Optimizer] = [SGD(module.parameters(), lr=0.1)]
        self.scaler, self.num_settled = LossScaler(self.device, is_on=False), 0

    def forward_backward(self, step: Step, batches: Sequence[Any]) -> Tensor:
        self.optimizers[0].zero_grad()
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            if index:
                self.hooks.batch_end(index - 1)
            self.hooks.batch_start(batch, index)
            loss: Tensor = step(batch, index) / len(batches)
            torch.autograd.backward(loss)
            self.hooks.batch_loss(loss.detach(), index)
            total = total + loss.detach()
        return total

    def step(self, optimizer: Optimizer | None = None, closure: Any = None) -> None:
        self.optimizers[0].step()

    def free_gradients(self, optimizer: Optimizer | None = None) -> None:
        self.optimizers[0].zero_grad()

    def step_with_closure(self, step: Step, batches: Sequence[Any], update: Callable[[Any], Any]) -> Tensor | None:
        raise NotImplementedError

    def forward(self, step: Callable[[Any], Any], batch: Any) -> Any:
        return step(batch)

    def move(self, batch: Any) -> Any:
        return batch

    def clip(self, max_norm: Any = None, algorithm: Any = None, *, optimizer: Any = None) -> Tensor | None: ...
    def settle(self) -> None:
        self.num_settled += 1

    def state(self) -> dict[str, Any]:
        return {"module": self.weights(), "optimizers": [], "scaler": None}

    def weights(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_weights(self, weights: Mapping[str, Any]) -> None: ...
    def load(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None: ...
    def unscale(self, optimizer: Optimizer | None = None) -> None: ...
    def change_gradients(self, optimizer: Optimizer | None = None) -> None: ...
    def leave_out_update(self) -> None: ...
    def complete_updates(self) -> None: ...
    def close(self) -> None: ...
    def check(self, state: Mapping[str, Any]) -> None: ...
    def places(self, stored: Sequence[Mapping[str, Any]], *, is_spec: Any, unneeded: Any) -> Any: ...
    def trained_parameters_changed(self) -> None: ...
    def watch(self, context: AbstractContextManager[Any]) -> None: ...


class Line(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.settled_before: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self.net(batch)
        return (output - 1).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.settled_before.append(self.engine.num_settled)

    engine: Any


def open_with_fake_engine(module: Line, root: Path, **loaders: Any) -> Any:
    """Return a run of ``module`` with a FakeEngine, without a Trainer."""

    def build(
        plan: Plan, module: roomier.Module, optimizers: ConfigureOptimizers, settled: Settled, facts: Facts
    ) -> tuple[Engine, Configured]:
        engine = FakeEngine(module)
        vars(module)["engine"] = engine
        return engine, Configured(engine.optimizers)

    trainer, options = SimpleNamespace(should_stop=False), LoopOptions(max_steps=6)
    request = Request(
        stage="fit",
        module=module,
        loaders=loaders,
        datamodule=None,
        ckpt_path=None,
        weights=None,
        plan=Plan.from_dict({"batch": {"accumulate_grad_batches": 2}}),
        options=options,
        world=World(),
        root=root,
        keeps_files=False,
        keeps_checkpoints=False,
        trainer=trainer,  # type: ignore[arg-type]  # the loop reads should_stop only
        state=TrainerState(),
    )
    data = RunLoaders(module, request.loaders, None, options, Ranks())
    settled = settle(request, data, Ranks())
    assert settled.plan is request.plan
    return open_run(settled, module, build=build)


def test_fake_engine_drives_the_loop(tmp_path: Path) -> None:
    module = Line()
    batches = [torch.randn(4, 3) for _ in range(4)]
    run = open_with_fake_engine(module, tmp_path, train=batches, val=batches[:1])
    restore_run(run)
    with run.settled.request.state.within(RunningStage.TRAINING):
        fit(run)
    assert (run.progress.global_step, run.progress.epoch) == (6, 3)
    assert run.now.last_loss is not None
    assert float(run.now.last_loss) < 0.5
    assert module.settled_before == [1, 3, 5]  # before and after each validation
    save_checkpoint(run, tmp_path / "saved", weights_only=False)
    assert checkpoint.load(tmp_path / "saved")["progress"]["global_step"] == 6
