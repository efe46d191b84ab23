"""Prepared model, optimizers and schedulers. The last two take effect only at the end of an accumulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.engine.optimizer_state import shard_like
from roomier.engine.prepared import ModelEngine
from roomier.prepared.loader import AccumulationState
from roomier.techniques.optim.proxy import OptimizerProxy


class PreparedOptimizer(OptimizerProxy):
    """Proxy for ``optimizer`` whose ``step`` and ``zero_grad`` have no effect while gradients accumulate.

    Args:
        optimizer: optimizer to wrap.
        engine: the engine of the model whose parameters the optimizer updates.
        accumulation: position of the loop.
    """

    def __init__(self, optimizer: Optimizer, engine: ModelEngine, accumulation: AccumulationState) -> None:
        super().__init__(optimizer)
        self._engine = engine
        self._accumulation = accumulation
        self._num_skipped: Tensor | None = None  # number of skipped steps before the last step

    def step(self, closure: Any = None) -> None:
        """Update the parameters, unless gradients accumulate. With loss scaling, gradients that are not finite also
        prevent the update."""
        if not self._accumulation.is_syncing:
            return
        if self._engine.scaler.is_on:
            self._num_skipped = self._engine.scaler.num_skipped.clone()
        self._engine.step(self.optimizer, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients, unless gradients accumulate.

        Args:
            set_to_none: if True, set gradients to None; if False, set gradients to zero.
        """
        if not self._accumulation.is_syncing:
            return
        if set_to_none:  # the zero_grad of some optimizers takes no argument
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=False)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because gradients were not finite. This property waits for the device."""
        return self._num_skipped is not None and bool(self._engine.scaler.num_skipped > self._num_skipped)

    def train(self) -> None:
        """Set an optimizer with separate modes, such as a schedule-free optimizer, to training mode."""
        self._set_mode("train")

    def eval(self) -> None:
        """Set an optimizer with separate modes, such as a schedule-free optimizer, to evaluation mode."""
        self._set_mode("eval")

    def _set_mode(self, name: str) -> None:
        set_mode = getattr(self.optimizer, name, None)
        if callable(set_mode):
            set_mode()


class PreparedScheduler:
    """Proxy for ``scheduler`` that steps with the optimizer.

    A scheduler in a script for Accelerate counts the batches of all processes. An optimizer step consumes one batch per
    process. The scheduler therefore steps once per process in each optimizer step, unless ``splits_batches`` is set.

    Args:
        scheduler: scheduler to wrap.
        optimizers: the prepared optimizers, which include the optimizer of the scheduler.
        accumulation: position of the loop.
        num_processes: number of ranks.
        steps_with_optimizer: if False, each call to ``step`` steps the scheduler once.
        splits_batches: whether the batches of a loader are divided among the ranks.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        accumulation: AccumulationState,
        *,
        num_processes: int,
        steps_with_optimizer: bool,
        splits_batches: bool,
    ) -> None:
        self.scheduler = scheduler
        owner = getattr(scheduler, "optimizer", None)
        self._optimizers = [each for each in optimizers if owner in (each, each.optimizer)] or list(optimizers)
        self._accumulation = accumulation
        self._num_repeats = 1 if splits_batches else num_processes
        self._steps_with_optimizer = steps_with_optimizer

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.scheduler)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler, unless gradients accumulate or the optimizer step was skipped."""
        if not self._steps_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._accumulation.is_syncing or any(each.step_was_skipped for each in self._optimizers):
            return
        num_all = getattr(self.scheduler, "total_steps", None)  # OneCycleLR raises an error after its last step
        for _ in range(self._num_repeats):
            if num_all is None or self.scheduler.last_epoch < num_all:
                self.scheduler.step(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.scheduler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)


class PreparedModel(nn.Module):
    """Model whose forward pass runs in the precision and with the strategy of a Plan.

    The attributes and methods of the network that ``nn.Module`` does not have are available on the prepared model.
    Calls to these methods do not use the engine.

    Attributes:
        module: network that was prepared.
        engine: the engine that runs the network.
        accelerator: the Accelerator that prepared the network.
    """

    module: nn.Module

    def __init__(self, engine: ModelEngine, accelerator: Any) -> None:
        super().__init__()
        self.module = engine.module
        self.engine = engine
        self.accelerator = accelerator
        self.training = engine.module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the network."""
        return self.engine.call(args, kwargs)

    def train(self, mode: bool = True) -> PreparedModel:
        """Set the mode of the network, and reshard parameters that an evaluation unsharded."""
        self.engine.settle()
        super().train(mode)
        return self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which gradients accumulate and are not reduced over the ranks."""
        before, self.engine.reduces = self.engine.reduces, False
        try:
            yield
        finally:
            self.engine.reduces = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the network, with the keys of the original network. Sharded parameters are
        DTensors."""
        self.engine.settle()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict that contains full or sharded tensors into the network."""
        own = self.state_dict()
        sharded = {name: shard_like(own.get(name), each) for name, each in state_dict.items()}
        return self.module.load_state_dict(sharded, strict=strict, assign=assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
