"""StochasticWeightAveraging: callback that averages the weights of the last epochs at a constant learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR

from roomier.api.callback import KeptWeights
from roomier.api.hooks import step_of
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.callbacks.weight_averaging import HoldsAverage
from roomier.core.batch_norms import BATCH_NORMS
from roomier.core.errors import DataError, RoomierError, check_integer
from roomier.core.forms import anything, count, fields, integer, mapping_of, optional
from roomier.core.log import notice
from roomier.run.run import run_of
from roomier.techniques.optim.averaging import AverageOne, WeightAverage, tensors_to_average

KEY = "stochastic_average"  # key in a checkpoint


class StochasticWeightAveraging(HoldsAverage):
    """Callback for Stochastic Weight Averaging.

    The callback implements Algorithm 1 of Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better
    Generalization" (arXiv:1803.05407). From the epoch ``swa_epoch_start`` on, torch's ``SWALR`` replaces the module's
    scheduler, anneals the learning rate to ``swa_lrs`` and then keeps the rate constant. The average includes the
    weights at the start of each of these epochs.

    After ``max_epochs``, the model receives the average. Then, one pass over the training data of all ranks recomputes
    the running statistics of BatchNorm modules. This pass runs without updates and without hooks. If a run ends before
    ``max_epochs``, the model retains its trained weights.

    The arguments, the averaged epochs and the resulting weights are the same as in Lightning, with two differences.
    Sharded parameters are supported: each rank averages its shard. In Lightning, the pass for BatchNorm is an
    additional epoch, and the average is updated one more time at the end of this epoch.

    A checkpoint of a run contains the trained weights and the average. After ``fit``, ``save_checkpoint`` saves the
    average as the weights of the model. The average requires the memory of a second copy of the weights. Plans include
    this copy if it is on the same device as the weights.

    Args:
        swa_lrs: final learning rate, or a list with one rate per parameter group.
        swa_epoch_start: epoch in which averaging starts, counted from 1. A float is a fraction of ``max_epochs``.
        annealing_epochs: number of epochs over which the learning rate is annealed.
        annealing_strategy: ``"cos"`` or ``"linear"``.
        avg_fn: function ``(average, weight, num_averaged) -> average`` that replaces the mean.
        device: device of the average; None uses the device of the weights.

    Raises:
        RoomierError: an argument is invalid. The error is also raised when training starts if there are several
            optimizers or schedulers, or if ``swa_epoch_start`` is a fraction and ``max_epochs`` is not set.

    Example:
        >>> trainer = roomier.Trainer(max_epochs=20, callbacks=[StochasticWeightAveraging(swa_lrs=1e-2)])
    """

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: AverageOne | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:
        rates = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
        if not rates or not all(isinstance(each, (int, float)) and 0 < each < math.inf for each in rates):
            action = "Pass a positive number, or a list with one number per parameter group"
            raise self._wrong("swa_lrs", swa_lrs, "must be a positive learning rate", action)
        is_share = isinstance(swa_epoch_start, float)
        if isinstance(swa_epoch_start, bool) or not (0 <= swa_epoch_start <= 1 if is_share else swa_epoch_start >= 1):
            action = (
                "Pass the number of an epoch, counted from 1, or a fraction of max_epochs as a float from 0.0 to 1.0"
            )
            raise self._wrong("swa_epoch_start", swa_epoch_start, "is not a valid epoch", action)
        field = f"{type(self).__name__}(annealing_epochs)"
        check_integer(field, annealing_epochs, 0, "Use an integer such as 10")
        if annealing_strategy not in ("cos", "linear"):
            raise self._wrong("annealing_strategy", annealing_strategy, "is not a strategy", "Use 'cos' or 'linear'")
        self._check_function("avg_fn", avg_fn)
        self._rates = [float(each) for each in rates]
        self._epoch_start = swa_epoch_start
        self._annealing = {"anneal_epochs": annealing_epochs, "anneal_strategy": annealing_strategy}
        self._avg_fn = avg_fn
        self._device = None if device is None else torch.device(device)
        self.kept_weights = KeptWeights(device=self._device)
        self._reset()

    def _reset(self) -> None:
        self._average: WeightAverage | None = None
        self._scheduler: SWALR | None = None
        self._former_state = False, False  # State of the module's schedulers before this callback replaced them.
        self._stored: dict[str, Any] = {}
        self._latest_epoch = -1

    # Checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_averaged": self.num_averaged,
            "latest_epoch": self._latest_epoch,
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
        }

    def check_stored_state(self, state: Any, place: str) -> None:
        """See :class:`roomier.api.callback.ChecksState`."""
        scheduler = optional(mapping_of(anything))
        form = {"num_averaged": count, "latest_epoch": integer(-1), "scheduler": scheduler}
        fields(form, others=anything)(state, place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._latest_epoch = state_dict["latest_epoch"]

    def on_save_checkpoint(self, trainer: TrainerView, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        if self._average is not None and "optimizers" in checkpoint:
            checkpoint[KEY] = self._average.averaged()

    def places(self, weights: Mapping[str, Tensor], stored: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`roomier.api.callback.PlacesTensors`."""
        places = {
            name: torch.empty_like(weights[name], dtype=spec.dtype)
            for name, spec in stored.get(KEY, {}).items()
            if name in weights
        }
        return {KEY: places} if places else {}

    def on_load_checkpoint(self, trainer: TrainerView, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        self._stored = checkpoint["callbacks"].get(self.state_key, {})
        if self._scheduler is not None:  # the run returned to an earlier checkpoint
            self._roll_back(trainer, self._scheduler)
        values, self._average = checkpoint.get(KEY), None
        if values and self._stored:
            average = self._begin(trainer)
            average.take(values)
            average.num_averaged = self._stored["num_averaged"]

    def _roll_back(self, trainer: TrainerView, scheduler: SWALR) -> None:
        state = self._stored.get("scheduler")
        if state is not None:
            scheduler.load_state_dict(state)
            return
        schedulers = run_of(trainer, "StochasticWeightAveraging").schedulers
        schedulers.are_there, schedulers.watch_each_step = self._former_state
        self._scheduler = None

    # Hooks of the run ---------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            self._reset()

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        run = run_of(trainer, "StochasticWeightAveraging")
        if len(trainer.optimizers) != 1 or len(trainer.lr_scheduler_configs) > 1:
            received = f"{len(trainer.optimizers)} optimizers, {len(trainer.lr_scheduler_configs)} schedulers"
            action = "Configure one optimizer and at most one scheduler"
            problem = "supports only one optimizer and at most one scheduler"
            raise RoomierError("StochasticWeightAveraging", received, problem, action)
        num_groups = len(trainer.optimizers[0].param_groups)
        if len(self._rates) not in (1, num_groups):
            problem = f"must have one rate for each of the {num_groups} parameter groups"
            raise self._wrong("swa_lrs", self._rates, problem, "Pass one number, or one number per group")
        if isinstance(self._epoch_start, float) and math.isinf(run.settled.epoch_limit):
            raise self._wrong(
                "swa_epoch_start", self._epoch_start, "is a fraction of max_epochs, which is not set", "Set max_epochs"
            )
        if batch_norms_of(run.module) and run.source.may_end_apart and not run.ranks.is_alone:
            problem = "requires the same number of batches on each rank to recompute its statistics"
            action = "Pass a loader with a length, or a model without BatchNorm"
            raise RoomierError("StochasticWeightAveraging", "BatchNorm", problem, action)
        if self._stored.get("scheduler") is not None:
            self._replace_scheduler(trainer).load_state_dict(self._stored["scheduler"])

    def on_train_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        epoch, limit = trainer.current_epoch, run_of(trainer, "StochasticWeightAveraging").settled.epoch_limit
        if not self._first_epoch(limit) <= epoch < limit:
            return
        if self._scheduler is None:
            self._replace_scheduler(trainer)
            for config in trainer.lr_scheduler_configs:
                name = type(config.scheduler).__name__
                notice(
                    f"StochasticWeightAveraging: from epoch {epoch} on, SWALR replaces {name} and sets the learning "
                    "rate"
                )
        if epoch > self._latest_epoch:
            self._begin(trainer).update(average_one=self._avg_fn)
            self._latest_epoch = epoch

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._scheduler is not None and not trainer.is_last_save_point:  # the run continues with the next epoch
            self._scheduler.step()

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        run = run_of(trainer, "StochasticWeightAveraging")
        if self._average is None:
            return
        if math.isfinite(run.settled.epoch_limit) and trainer.current_epoch < run.settled.epoch_limit:
            notice("StochasticWeightAveraging: the run ended before max_epochs, so the model keeps the trained weights")
            return
        self._swap(trainer)
        if batch_norms_of(run.module):
            update_batch_norms(trainer)

    def _first_epoch(self, limit: float) -> int:
        start = self._epoch_start
        return max((int(limit * start) if isinstance(start, float) else start) - 1, 0)

    def _begin(self, trainer: TrainerView) -> WeightAverage:
        engine = trainer.engine
        if self._average is None:
            engine.settle()
            self._average = WeightAverage(tensors_to_average(engine.module.named_parameters()), self._device)
        return self._average

    def _replace_scheduler(self, trainer: TrainerView) -> SWALR:
        run = run_of(trainer, "StochasticWeightAveraging")
        groups = trainer.optimizers[0].param_groups
        rates = self._rates if len(self._rates) > 1 else self._rates * len(groups)
        for group, rate in zip(groups, rates, strict=True):
            group["initial_lr"] = rate
        self._scheduler = SWALR(trainer.optimizers[0], rates, **self._annealing)  # type: ignore[arg-type]
        self._former_state = run.schedulers.are_there, run.schedulers.watch_each_step
        run.schedulers.are_there = run.schedulers.watch_each_step = False
        return self._scheduler


def batch_norms_of(module: nn.Module) -> list[Any]:
    """Return the BatchNorm modules that have running statistics."""
    return [each for each in module.modules() if isinstance(each, BATCH_NORMS) and each.running_mean is not None]


def update_batch_norms(trainer: TrainerView) -> None:
    """Recompute the running statistics as means over the batches of one epoch (Izmailov et al. 2018, section 3.2).

    Every rank must call this function. The statistics are averaged over all ranks.

    Raises:
        DataError: a loader failed on one of several ranks.
    """
    run = run_of(trainer, "update_batch_norms")
    norms = batch_norms_of(run.module)
    for norm in norms:
        norm.reset_running_stats()
    limit = run.batches.num_training
    with _averaging_statistics(trainer, norms), torch.no_grad():
        try:
            batches = run.source.start(trainer.current_epoch)
            for batch_idx, batch in enumerate(islice(batches, None if math.isinf(limit) else int(limit))):
                _forward(trainer, batch, batch_idx)
        except DataError as error:
            if not run.ranks.is_alone:  # without an error, the other ranks would wait for this rank forever
                raise
            notice(f"StochasticWeightAveraging: the statistics of BatchNorm are incomplete: {error}")
    run.engine.settle()
    if not run.ranks.is_alone:
        for norm in norms:
            for statistic in (norm.running_mean, norm.running_var):
                statistic.copy_(run.ranks.sum(statistic) / run.ranks.world.size)


def _forward(trainer: TrainerView, batch: Any, batch_idx: int) -> None:
    run = run_of(trainer, "update_batch_norms")
    moved = run.results.batch = run.engine.move(batch)
    step = step_of(run.module, "training_step")
    run.engine.forward(lambda batch: step(batch, batch_idx), moved)


@contextmanager
def _averaging_statistics(trainer: TrainerView, norms: list[Any]) -> Iterator[None]:
    results = trainer.results
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # without momentum, BatchNorm computes the mean over all batches
    results.is_muted, results.is_in_batch = True, True
    try:
        yield
    finally:
        results.is_muted, results.is_in_batch, results.batch = False, False, None
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
