"""WeightAveraging: an average of the weights beside the training, which is validated, saved and kept at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roomier.api.callback import Callback
from roomier.api.kept_weights import KeptWeights
from roomier.core.errors import RoomierError
from roomier.core.forms import anything, count, fields, integer, list_of, text
from roomier.core.log import notice
from roomier.optim.averaging import AverageAll, AverageOne, WeightAverage, tensors_to_average

if TYPE_CHECKING:
    from roomier.api.module import Module
    from roomier.api.trainer_view import TrainerView

CURRENT, WIDE = "current_model_state", "averaged_weights"


class WeightAveraging(Callback):
    """Averages the weights: by default all iterates alike (Polyak and Juditsky 1992). Validation runs on the average, a
    checkpoint has it as the model's weights, and after ``fit`` the model has it; training goes on as without it.

    Until the first update there is no average, and the weights that are trained are validated. Arguments are those of
    Lightning's callback. The average is of parameters that are trained and of floating-point buffers; each rank
    averages its part where parameters are cut. It takes the memory of one more copy of the weights (in float32), which
    forecasts and plans count: ``device="cpu"`` keeps it in host memory, and copies the weights there at each update.

    In a checkpoint the average stands at ``"module"``, where evaluation and export look, and what is trained at
    ``"current_model_state"``; a resume is exact, and needs this callback.

    Args:
        device: where the average is held; by default beside the weights.
        use_buffers: average buffers as well (running statistics); else those of the model are used.
        avg_fn: ``(average, weight, num_averaged) -> average`` in place of the mean.
        multi_avg_fn: ``(averages, weights, num_averaged)``, on lists and in place; one of the two.

    Raises:
        RoomierError: an argument is wrong.
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
            if function is not None and not callable(function):
                raise self._wrong(name, function, "is no function", "Pass one as AveragedModel of torch takes it")
        if avg_fn is not None and multi_avg_fn is not None:
            raise self._wrong("avg_fn", avg_fn, "multi_avg_fn is given as well", "Pass one of the two")
        self._device = None if device is None else torch.device(device)
        self._use_buffers = use_buffers
        self.kept_weights = KeptWeights(use_buffers, self._device)
        self._functions: dict[str, Any] = {"average_one": avg_fn, "average_all": multi_avg_fn}
        self._weight: float | None = None  # of the newest weights; None counts all alike
        self._average: WeightAverage | None = None
        self._same_tensor: dict[str, str] = {}  # each name in a checkpoint, to the one it is averaged under
        self._is_training = False
        self._stored: dict[str, Any] = {}
        self._latest_update_step = 0
        self._latest_update_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Asked after each optimizer step and after each epoch; override it to average more seldom.

        Args:
            step_idx: of the step that is done, from 0; None at the end of an epoch.
            epoch_idx: of the epoch that is done, from 0; None after a step.
        """
        return step_idx is not None

    @property
    def num_averaged(self) -> int:
        """Updates so far."""
        return 0 if self._average is None else self._average.num_averaged

    @property
    def has_average_in_model(self) -> bool:
        """Whether the model has the averaged weights now."""
        return self._average is not None and self._average.is_swapped

    def held_weights(self) -> list[Tensor]:
        """See :class:`roomier.api.kept_weights.KeepsWeights`."""
        return [] if self._average is None else list(self._average.averages.values())

    # The run ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            self._average, self._is_training, self._stored = None, False, {}
            self._latest_update_step, self._latest_update_epoch = 0, -1

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._held(trainer)
        self._is_training = True

    def on_train_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._held(trainer).join(self._tensors(trainer))  # what was unfrozen since

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
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
            self._swap(trainer)  # what was trained is kept: a checkpoint written later holds both
        else:
            notice(f"{type(self).__name__}: should_update never said yes, so the model keeps the weights it has")

    def teardown(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit" and self._is_training and self.has_average_in_model:  # it ended within a validation
            assert self._average is not None
            self._average.swap()

    # Checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "latest_update_step": self._latest_update_step,
            "latest_update_epoch": self._latest_update_epoch,
            "num_averaged": self.num_averaged,
            "names": [] if self._average is None else self._average.names,
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
        self._stored = dict(state_dict)
        self._latest_update_step = state_dict["latest_update_step"]
        self._latest_update_epoch = state_dict["latest_update_epoch"]

    def on_save_checkpoint(self, trainer: TrainerView, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        average = self._average
        if average is None or not average.num_averaged:
            return
        averaged, current, module = average.averaged(), average.current(), checkpoint["module"]
        own = {name: first for name, first in self._same_tensor.items() if first in averaged and name in module}
        checkpoint["module"] = {**module, **{name: averaged[first] for name, first in own.items()}}
        if "optimizers" not in checkpoint:  # of weights alone
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
        """The model has the weights at ``"module"`` by now: the average, where there was one."""
        self._average = None
        if CURRENT not in checkpoint:
            if not self._stored:
                notice(f"the checkpoint was saved without {type(self).__name__}: the average begins here")
            return
        if not self._stored:
            raise RoomierError(
                "callbacks",
                type(self).__name__,
                f"the checkpoint has an average of weights, but not under the name {self.state_key!r}",
                "Resume with the callback of the run that was saved",
            )
        average = self._held(trainer, set(self._stored["names"]))
        average.take({**trainer.engine.weights(), **checkpoint.get(WIDE, {})})
        average.num_averaged = self._stored["num_averaged"]
        with torch.no_grad():
            for name, own in trainer.engine.weights().items():
                own.copy_(checkpoint[CURRENT][name])
        checkpoint.pop(CURRENT)

    # ----------------------------------------------------------------------------------------------------------------

    def _held(self, trainer: TrainerView, names: set[str] | None = None) -> WeightAverage:
        if self._average is None:
            tensors = self._tensors(trainer, names)
            self._average = WeightAverage(tensors, self._device)
        return self._average

    def _tensors(self, trainer: TrainerView, names: set[str] | None = None) -> dict[str, Tensor]:
        """What is averaged, by name: parameters as they are between steps, and buffers that are saved.

        Args:
            names: those that a checkpoint says; None for those that are trained now.
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

    def _swap(self, trainer: TrainerView) -> None:
        assert self._average is not None
        with torch.inference_mode(False):  # what is written in it could not be trained on
            trainer.engine.settle()
            self._average.swap()
            trainer.engine.settle()

    def _share_buffers(self, trainer: TrainerView) -> None:
        """An average of running statistics is that of this rank's; what is measured is one model, that of rank 0."""
        average = self._average
        if trainer.ranks.is_alone or average is None or not self._use_buffers:
            return
        names = [name for name, _ in trainer.engine.module.named_buffers() if name in average.averages]
        if names:
            average.take(
                dict(zip(names, trainer.ranks.from_zero([average.averages[n].cpu() for n in names]), strict=True))
            )

    @classmethod
    def _wrong(cls, field: str, received: object, problem: str, action: str) -> RoomierError:
        return RoomierError(f"{cls.__name__}({field})", received, problem, action)


class EMAWeightAveraging(WeightAveraging):
    """Averages the weights exponentially: ``average = decay * average + (1 - decay) * weights`` after each step (the
    moving average of Tarvainen and Valpola 2017, "Mean teachers are better role models", section 2).

    Args:
        device, use_buffers: see :class:`WeightAveraging`.
        decay: in [0, 1].
        update_every_n_steps: after the optimizer steps with an index, from 0, that this divides; 0 for none.
        update_starting_at_step: not before the step of this index.
        update_starting_at_epoch: after each epoch from this one on, as well; None for no epoch.

    Raises:
        RoomierError: an argument is wrong.
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
            raise self._wrong("decay", decay, "is not between 0 and 1", "Use 0.999, say")
        if not isinstance(update_every_n_steps, int) or update_every_n_steps < 0:
            raise self._wrong("update_every_n_steps", update_every_n_steps, "is no number of steps", "Use 1, say")
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
