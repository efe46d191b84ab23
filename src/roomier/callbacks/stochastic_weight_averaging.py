"""StochasticWeightAveraging: the mean of the weights along the last epochs, at a rate that keeps them moving."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR

from roomier.api.callback import Callback
from roomier.api.kept_weights import KeptWeights
from roomier.api.step_arguments import num_step_arguments
from roomier.core.batch_norms import BATCH_NORMS
from roomier.core.errors import DataError, RoomierError
from roomier.core.forms import anything, count, fields, integer, mapping_of, optional
from roomier.core.log import notice
from roomier.optim.averaging import AverageOne, WeightAverage, tensors_to_average
from roomier.run.run import run_of

if TYPE_CHECKING:
    from roomier.api.module import Module
    from roomier.api.trainer_view import TrainerView

KEY = "stochastic_average"  # of a checkpoint


class StochasticWeightAveraging(Callback):
    """Stochastic Weight Averaging: Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better
    Generalization" (arXiv:1803.05407), algorithm 1.

    From an epoch on, the learning rate anneals to ``swa_lrs`` and stays there (``SWALR`` of torch), in place of the
    module's scheduler, and the weights with which each epoch begins are averaged. When ``max_epochs`` are done the
    model gets the average, and the running statistics of its BatchNorm modules are taken anew, by one pass over the
    training data without an update; on several ranks they are those of all. Arguments, epochs and weights are those of
    Lightning's callback; other than that one it works where parameters are cut, where each rank averages its part. No
    hooks are called in that pass; in Lightning it is one more epoch, at whose end the average is updated once more.

    A checkpoint of a run holds the weights that are trained and, beside them, the average; what ``save_checkpoint``
    writes after ``fit`` has the average as the model's weights. A run that ends before ``max_epochs`` keeps what it
    trained. The average takes the memory of one more copy of the weights, which plans count where it is
    held beside them.

    Args:
        swa_lrs: the learning rate to anneal to, or one for each parameter group.
        swa_epoch_start: the epoch, counted from 1, in which it begins; a float is a share of ``max_epochs``.
        annealing_epochs: over how many epochs the rate changes.
        annealing_strategy: ``"cos"`` or ``"linear"``.
        avg_fn: ``(average, weight, num_averaged) -> average`` in place of the mean.
        device: where the average is held; None: beside the weights.

    Raises:
        RoomierError: an argument is wrong; when a fit begins, that there are several optimizers or schedulers, or no
            ``max_epochs`` to take a share of.
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
            raise _wrong("swa_lrs", swa_lrs, "is no learning rate", "Give a positive number, or one for each group")
        is_share = isinstance(swa_epoch_start, float)
        if isinstance(swa_epoch_start, bool) or not (0 <= swa_epoch_start <= 1 if is_share else swa_epoch_start >= 1):
            action = "Give the number of an epoch from 1, or a float from 0.0 to 1.0"
            raise _wrong("swa_epoch_start", swa_epoch_start, "is no epoch to begin in", action)
        if not isinstance(annealing_epochs, int) or annealing_epochs < 0:
            raise _wrong("annealing_epochs", annealing_epochs, "is no number of epochs", "Use 10, say")
        if annealing_strategy not in ("cos", "linear"):
            raise _wrong("annealing_strategy", annealing_strategy, "is not known", "Use 'cos' or 'linear'")
        if avg_fn is not None and not callable(avg_fn):
            raise _wrong("avg_fn", avg_fn, "is no function", "Pass one as AveragedModel of torch takes it")
        self._rates = [float(each) for each in rates]
        self._epoch_start = swa_epoch_start
        self._annealing = {"anneal_epochs": annealing_epochs, "anneal_strategy": annealing_strategy}
        self._avg_fn = avg_fn
        self._device = None if device is None else torch.device(device)
        self.kept_weights = KeptWeights(device=self._device)
        self._forget()

    def _forget(self) -> None:
        self._average: WeightAverage | None = None
        self._scheduler: SWALR | None = None
        self._former_turns = False, False  # of the module's schedulers
        self._stored: dict[str, Any] = {}
        self._latest_epoch = -1

    @property
    def num_averaged(self) -> int:
        """How many weights the average is of."""
        return 0 if self._average is None else self._average.num_averaged

    def held_weights(self) -> list[Tensor]:
        """See :class:`roomier.api.kept_weights.KeepsWeights`."""
        return [] if self._average is None else list(self._average.averages.values())

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
        self._stored = dict(state_dict)
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
        if self._scheduler is not None:  # a run that goes back
            self._go_back(trainer, self._scheduler)
        values, self._average = checkpoint.get(KEY), None
        if values and self._stored:
            average = self._begin(trainer)
            average.take(values)
            average.num_averaged = self._stored["num_averaged"]

    def _go_back(self, trainer: TrainerView, scheduler: SWALR) -> None:
        state = self._stored.get("scheduler")
        if state is not None:
            scheduler.load_state_dict(state)
            return
        schedulers = run_of(trainer, "StochasticWeightAveraging").schedulers
        schedulers.are_there, schedulers.watch_each_step = self._former_turns
        self._scheduler = None

    # The run ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            self._forget()

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        run = run_of(trainer, "StochasticWeightAveraging")
        if len(trainer.optimizers) != 1 or len(trainer.lr_scheduler_configs) > 1:
            received = f"{len(trainer.optimizers)} optimizers, {len(trainer.lr_scheduler_configs)} schedulers"
            action = "Configure one optimizer, and at most one scheduler"
            raise RoomierError("StochasticWeightAveraging", received, "it sets the learning rate of one", action)
        num_groups = len(trainer.optimizers[0].param_groups)
        if len(self._rates) not in (1, num_groups):
            raise _wrong("swa_lrs", self._rates, f"there are {num_groups} parameter groups", "Give one for each")
        if isinstance(self._epoch_start, float) and math.isinf(run.settled.epoch_limit):
            raise _wrong("swa_epoch_start", self._epoch_start, "there is no max_epochs to take a share of", "Set it")
        if batch_norms_of(run.module) and run.source.may_end_apart and not run.ranks.is_alone:
            problem = "the ranks may have different numbers of batches for its statistics"
            action = "Pass a loader with a length, or a model without BatchNorm"
            raise RoomierError("StochasticWeightAveraging", "BatchNorm", problem, action)
        if self._stored.get("scheduler") is not None:
            self._take_over_rate(trainer).load_state_dict(self._stored["scheduler"])

    def on_train_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        epoch, limit = trainer.current_epoch, run_of(trainer, "StochasticWeightAveraging").settled.epoch_limit
        if not self._first_epoch(limit) <= epoch < limit:
            return
        if self._scheduler is None:
            self._take_over_rate(trainer)
            for config in trainer.lr_scheduler_configs:
                name = type(config.scheduler).__name__
                notice(f"StochasticWeightAveraging sets the learning rate from epoch {epoch} on, in place of {name}")
        if epoch > self._latest_epoch:
            self._begin(trainer).update(average_one=self._avg_fn)
            self._latest_epoch = epoch

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._scheduler is not None and not trainer.is_last_save_point:  # else it ended within the epoch
            self._scheduler.step()

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        run = run_of(trainer, "StochasticWeightAveraging")
        if self._average is None:
            return
        if math.isfinite(run.settled.epoch_limit) and trainer.current_epoch < run.settled.epoch_limit:
            notice("StochasticWeightAveraging: the run ended before max_epochs, so the model keeps what it trained")
            return
        run.engine.settle()
        self._average.swap()
        run.engine.settle()
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

    def _take_over_rate(self, trainer: TrainerView) -> SWALR:
        run = run_of(trainer, "StochasticWeightAveraging")
        rates: Any = self._rates if len(self._rates) > 1 else self._rates[0]
        self._scheduler = SWALR(trainer.optimizers[0], rates, **self._annealing)  # type: ignore[arg-type]
        self._former_turns = run.schedulers.are_there, run.schedulers.watch_each_step
        run.schedulers.are_there = run.schedulers.watch_each_step = False
        return self._scheduler


def batch_norms_of(module: nn.Module) -> list[Any]:
    """The BatchNorm modules that keep running statistics."""
    return [each for each in module.modules() if isinstance(each, BATCH_NORMS) and each.running_mean is not None]


def update_batch_norms(trainer: TrainerView) -> None:
    """Take the running statistics anew, as means over the batches of one epoch of training data (Izmailov et al. 2018,
    section 3.2). Every rank must call it; the statistics are those of all.

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
            if not run.ranks.is_alone:  # the others are in a forward, or in the sum below, and wait for this one
                raise
            notice(f"StochasticWeightAveraging: the statistics of BatchNorm are not complete: {error}")
    run.engine.settle()
    if not run.ranks.is_alone:
        for norm in norms:
            for statistic in (norm.running_mean, norm.running_var):
                statistic.copy_(run.ranks.sum(statistic) / run.ranks.world.size)


def _forward(trainer: TrainerView, batch: Any, batch_idx: int) -> None:
    run = run_of(trainer, "update_batch_norms")
    moved = run.results.batch = run.engine.move(batch)

    takes_index = num_step_arguments(run.module, "training_step", 2) > 1

    def step(moved: Any) -> Any:
        return run.module.training_step(moved, batch_idx) if takes_index else run.module.training_step(moved)

    run.engine.forward(step, moved)


@contextmanager
def _averaging_statistics(trainer: TrainerView, norms: list[Any]) -> Iterator[None]:
    results = trainer.results
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the plain mean of all batches
    results.is_muted, results.is_in_batch = True, True
    try:
        yield
    finally:
        results.is_muted, results.is_in_batch, results.batch = False, False, None
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _wrong(field: str, received: object, problem: str, action: str) -> RoomierError:
    return RoomierError(f"StochasticWeightAveraging({field})", received, problem, action)
