"""WeightAveraging: callback that averages the weights during training, for validation, checkpoints and the final
model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from roomier.api.callback import Callback, KeptWeights
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.core.errors import RoomierError, check_integer
from roomier.core.forms import anything, count, fields, integer, list_of, text
from roomier.core.log import notice
from roomier.techniques.optim.averaging import AverageAll, AverageOne, WeightAverage, tensors_to_average


class HoldsAverage(Callback):
    """Callback that holds a :class:`WeightAverage`, which is created during a fit."""

    _average: WeightAverage | None = None

    @property
    def num_averaged(self) -> int:
        """Number of weight snapshots in the average."""
        return 0 if self._average is None else self._average.num_averaged

    def held_weights(self) -> list[Tensor]:
        """See :class:`roomier.api.callback.KeepsWeights`."""
        return [] if self._average is None else list(self._average.averages.values())

    def _swap(self, trainer: TrainerView) -> None:
        """Exchange the weights of the model with their average."""
        assert self._average is not None
        with torch.inference_mode(False):  # tensors created in inference mode cannot be used in training
            trainer.engine.settle()
            self._average.swap()
            trainer.engine.settle()

    @classmethod
    def _wrong(cls, field: str, received: object, problem: str, action: str) -> RoomierError:
        return RoomierError(f"{cls.__name__}({field})", received, problem, action)

    @classmethod
    def _check_function(cls, field: str, function: object) -> None:
        if function is not None and not callable(function):
            raise cls._wrong(field, function, "must be callable", "Pass a function as for torch's AveragedModel")


CURRENT, WIDE = "current_model_state", "averaged_weights"


class WeightAveraging(HoldsAverage):
    """Callback that averages the weights over training. By default, the weights of all steps contribute equally (Polyak
    and Juditsky 1992).

    Validation uses the average. A checkpoint contains the average as the weights of the model, and the model contains
    the average after ``fit`` ends. The training itself is unchanged. Before the first update of the average, the
    trained weights are used instead.

    The arguments are the same as in Lightning. The average includes trained parameters and floating-point buffers. If
    parameters are sharded, each rank averages its shard. The average requires memory for a second copy of the weights
    (in float32), and forecasts and plans include this copy. With ``device="cpu"``, the average is stored in host
    memory, and each update copies the weights to the host.

    In a checkpoint, the average is stored at ``"module"``, which evaluation and export read, and the trained weights
    are stored at ``"current_model_state"``. Resuming is exact and requires this callback.

    Args:
        device: device of the average; by default the device of the weights.
        use_buffers: if True, also average buffers (running statistics); otherwise use the buffers of the model.
        avg_fn: function ``(average, weight, num_averaged) -> average`` that replaces the mean.
        multi_avg_fn: function ``(averages, weights, num_averaged)`` that updates the list ``averages`` in place. Set at
            most one of ``avg_fn`` and ``multi_avg_fn``.

    Raises:
        RoomierError: an argument is invalid.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[WeightAveraging(device="cpu")])
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        *,
        avg_fn: AverageOne | None = None,
        multi_avg_fn: AverageAll | None = None,
    ) -> None:
        for name, function in (("avg_fn", avg_fn), ("multi_avg_fn", multi_avg_fn)):
            self._check_function(name, function)
        if avg_fn is not None and multi_avg_fn is not None:
            raise self._wrong("avg_fn", avg_fn, "cannot be combined with multi_avg_fn", "Pass one of the two")
        self._device = None if device is None else torch.device(device)
        self._use_buffers = use_buffers
        self.kept_weights = KeptWeights(use_buffers, self._device)
        self._functions: dict[str, Any] = {"average_one": avg_fn, "average_all": multi_avg_fn}
        self._weight: float | None = None  # factor of the newest weights; None weights all steps equally
        self._same_tensor: dict[str, str] = {}  # Maps each name in a checkpoint to the name in the average.
        self._is_training = False
        self._latest_update_step = 0
        self._latest_update_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return True to update the average. This method is called after each optimizer step and after each epoch.

        Override this method to update the average less often.

        Args:
            step_idx: index of the completed step, counted from 0; None at the end of an epoch.
            epoch_idx: index of the completed epoch, counted from 0; None after a step.
        """
        return step_idx is not None

    @property
    def has_average_in_model(self) -> bool:
        """True while the model contains the averaged weights."""
        return self._average is not None and self._average.is_swapped

    # Hooks of the run ---------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            self._average, self._is_training = None, False
            self._latest_update_step, self._latest_update_epoch = 0, -1

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._held(trainer)
        self._is_training = True

    def on_train_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._held(trainer).join(self._tensors(trainer))  # add parameters that have been unfrozen

    def on_train_batch_end(self, trainer: TrainerView, pl_module: Module, *_: Any, **__: Any) -> None:
        step = trainer.global_step
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._update(trainer)
            self._latest_update_step = step

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        epoch = trainer.current_epoch
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._update(trainer)
            self._latest_update_epoch = epoch

    def on_validation_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._is_training and self.num_averaged:
            self._share_buffers(trainer)
            self._swap(trainer)

    def on_validation_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._is_training and self.has_average_in_model:
            self._swap(trainer)

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._is_training = False
        if self.num_averaged:
            self._share_buffers(trainer)
            self._swap(trainer)  # later checkpoints contain the average and the trained weights
        else:
            notice(f"{type(self).__name__}: should_update never returned True, so the model keeps its trained weights")

    def teardown(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit" and self._is_training and self.has_average_in_model:  # fit ended within a validation
            assert self._average is not None
            self._average.swap()

    # Checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "latest_update_step": self._latest_update_step,
            "latest_update_epoch": self._latest_update_epoch,
            "num_averaged": self.num_averaged,
            "names": [] if self._average is None else list(self._average.averages),
        }

    def check_stored_state(self, state: Any, place: str) -> None:
        """See :class:`roomier.api.callback.ChecksState`."""
        form = {
            "latest_update_step": count,
            "latest_update_epoch": integer(-1),
            "num_averaged": count,
            "names": list_of(text),
        }
        fields(form, others=anything)(state, place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._latest_update_step = state_dict["latest_update_step"]
        self._latest_update_epoch = state_dict["latest_update_epoch"]

    def on_save_checkpoint(self, trainer: TrainerView, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        average = self._average
        if average is None or not average.num_averaged:
            return
        averaged, current, module = average.averaged(), average.current(), checkpoint["module"]
        own = {name: first for name, first in self._same_tensor.items() if first in averaged and name in module}
        checkpoint["module"] = {**module, **{name: averaged[first] for name, first in own.items()}}
        if "optimizers" not in checkpoint:  # checkpoint with weights only
            return
        checkpoint[CURRENT] = {**module, **{name: current[first] for name, first in own.items()}}
        wide = average.wide()
        if wide:
            checkpoint[WIDE] = wide

    def places(self, weights: Mapping[str, Tensor], stored: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`roomier.api.callback.PlacesTensors`."""
        places: dict[str, Any] = {}
        if CURRENT in stored:
            places[CURRENT] = {name: torch.empty_like(each) for name, each in weights.items()}
        if WIDE in stored:
            places[WIDE] = {name: torch.empty_like(weights[name], dtype=torch.float32) for name in stored[WIDE]}
        return places

    def on_load_checkpoint(self, trainer: TrainerView, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Restore the average. The model already contains the weights at ``"module"``, which are the average if an
        average was saved."""
        self._average, stored = None, checkpoint["callbacks"].get(self.state_key)
        if CURRENT not in checkpoint:
            if stored is None:
                notice(f"the checkpoint was saved without {type(self).__name__}, so the average starts here")
            return
        if stored is None:
            problem = (
                f"is not in the checkpoint under the name {self.state_key!r}, but the checkpoint has averaged weights"
            )
            raise RoomierError("callbacks", type(self).__name__, problem, "Resume with the callback of the saved run")
        average = self._held(trainer, set(stored["names"]))
        average.take({**trainer.engine.weights(), **checkpoint.get(WIDE, {})})
        average.num_averaged = stored["num_averaged"]
        with torch.no_grad():
            for name, own in trainer.engine.weights().items():
                own.copy_(checkpoint[CURRENT][name])
        checkpoint.pop(CURRENT)

    # ----------------------------------------------------------------------------------------------------------------

    def _held(self, trainer: TrainerView, names: set[str] | None = None) -> WeightAverage:
        if self._average is None:
            self._average = WeightAverage(self._tensors(trainer, names), self._device)
        return self._average

    def _tensors(self, trainer: TrainerView, names: set[str] | None = None) -> dict[str, Tensor]:
        """Return the tensors to average, keyed by name: parameters and, with ``use_buffers``, persistent buffers.

        Args:
            names: names from a checkpoint; None selects the tensors that are currently trained.
        """
        engine = trainer.engine
        saved, network = engine.weights().keys(), engine.module
        parameters, buffers = dict(network.named_parameters()), dict(network.named_buffers())
        first = {id(each): name for name, each in (*parameters.items(), *buffers.items())}
        everywhere = (*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False))
        self._same_tensor = {name: first[id(each)] for name, each in everywhere}
        own = {name: each for name, each in buffers.items() if name in saved} if self._use_buffers else {}
        if names is not None:
            return {name: each for name, each in {**parameters, **own}.items() if name in names}
        return tensors_to_average(parameters.items(), own.items())

    def _update(self, trainer: TrainerView) -> None:
        self._held(trainer).update(self._weight, **self._functions)

    def _share_buffers(self, trainer: TrainerView) -> None:
        """Replace the averaged running statistics of this rank with the statistics of rank 0, so that all ranks
        evaluate the same model."""
        average = self._average
        if trainer.ranks.is_alone or average is None or not self._use_buffers:
            return
        names = [name for name, _ in trainer.engine.module.named_buffers() if name in average.averages]
        if names:
            average.take(trainer.ranks.from_zero({name: average.averages[name].cpu() for name in names}))


class EMAWeightAveraging(WeightAveraging):
    """Callback that averages the weights exponentially: ``average = decay * average + (1 - decay) * weights`` after
    each step.

    The result is the moving average of Tarvainen and Valpola 2017, "Mean teachers are better role models", section 2.

    Args:
        device: device of the average; see :class:`WeightAveraging`.
        use_buffers: if True, also average buffers; see :class:`WeightAveraging`.
        decay: factor of the previous average, in [0, 1].
        update_every_n_steps: update after each step whose index, counted from 0, is a multiple of this number; 0
            disables these updates.
        update_starting_at_step: index of the first step that updates the average.
        update_starting_at_epoch: also update after each epoch, starting with this epoch; None disables these updates.

    Raises:
        RoomierError: an argument is invalid.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[EMAWeightAveraging(decay=0.9999)])
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        super().__init__(device, use_buffers)
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
            raise self._wrong("decay", decay, "must be between 0 and 1", "Use a value such as 0.999")
        check_integer(f"{type(self).__name__}(update_every_n_steps)", update_every_n_steps, 0, "Use 1")
        self.decay = float(decay)
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        self._weight = 1 - self.decay

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            begins_at, every = self.update_starting_at_step or 0, self.update_every_n_steps
            return step_idx >= begins_at and every > 0 and step_idx % every == 0
        begins_at_epoch = self.update_starting_at_epoch
        return epoch_idx is not None and begins_at_epoch is not None and epoch_idx >= begins_at_epoch
