"""BaseFinetuning and BackboneFinetuning: parts of a model that are frozen at first and trained later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from roomier.api.callback import Callback
from roomier.core.batch_norms import BATCH_NORMS
from roomier.core.errors import RoomierError
from roomier.core.forms import anything, fields, finite, list_of, optional, text
from roomier.core.log import notice

if TYPE_CHECKING:
    from roomier.api.module import Module
    from roomier.api.trainer_view import TrainerView

Modules = nn.Module | Iterable[Any]
"""A module, or modules in lists within lists."""


class BaseFinetuning(Callback):
    """Freezes parameters before the optimizers are made, and gives them to an optimizer later. Write
    :meth:`freeze_before_training` and :meth:`finetune_function`; the names are Lightning's.

    The module's ``configure_optimizers`` takes the parameters with ``requires_grad`` alone. A resumed run has the
    groups and the frozen parts of the one that was saved. What is unfrozen is trained under ``ddp`` too, and where
    parameters are cut among ranks.
    """

    def __init__(self) -> None:
        self._trainer: TrainerView | None = None
        self._module: Any = None
        self._num_configured: dict[Optimizer, int] = {}

    # What the user writes -----------------------------------------------------------------------------------------

    def freeze_before_training(self, pl_module: Module) -> None:
        """Freeze what is not to be trained at first: ``self.freeze(pl_module.backbone)``."""
        raise self._unwritten("freeze_before_training", "(self, pl_module): self.freeze(pl_module.backbone)")

    def finetune_function(self, pl_module: Module, epoch: int, optimizer: Optimizer) -> None:
        """Called as each epoch begins, for each optimizer: ``self.unfreeze_and_add_param_group(...)``."""
        told = "(self, pl_module, epoch, optimizer): self.unfreeze_and_add_param_group(...) in the epoch it is due"
        raise self._unwritten("finetune_function", told)

    def _unwritten(self, name: str, definition: str) -> RoomierError:
        return RoomierError(name, type(self).__name__, "the callback does not define it", f"Define {name}{definition}")

    # What helps -----------------------------------------------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """All modules inside ``modules`` that have no children, or parameters of their own."""
        if isinstance(modules, nn.ModuleDict):
            modules = modules.values()
        if isinstance(modules, nn.Module) and not isinstance(modules, (nn.ModuleList, nn.Sequential)):
            found: Iterable[nn.Module] = modules.modules()
        elif isinstance(modules, nn.Module):
            found = [part for each in modules.children() for part in each.modules()]
        else:
            found = [part for each in modules for part in BaseFinetuning.flatten_modules(each)]
        return [
            each
            for each in dict.fromkeys(found)
            if next(each.children(), None) is None or next(each.parameters(recurse=False), None) is not None
        ]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of ``modules`` that are, or are not, trained; of BatchNorm only with ``train_bn``."""
        for each in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(each, BATCH_NORMS):
                yield from (p for p in each.parameters(recurse=False) if p.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Let the parameters of ``modules`` be trained, and BatchNorm follow its batches."""
        for each in BaseFinetuning.flatten_modules(modules):
            if isinstance(each, BATCH_NORMS):
                each.track_running_stats = True
            for parameter in each.parameters(recurse=False):
                parameter.requires_grad = True

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the own parameters of ``module``; a BatchNorm keeps its running statistics as they are."""
        if isinstance(module, BATCH_NORMS):
            module.track_running_stats = False
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze ``modules``; with ``train_bn``, BatchNorm is trained on."""
        for each in BaseFinetuning.flatten_modules(modules):
            if isinstance(each, BATCH_NORMS) and train_bn:
                BaseFinetuning.make_trainable(each)
            else:
                BaseFinetuning.freeze_module(each)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of ``params`` that ``optimizer`` does not have yet."""
        known = {id(each) for group in optimizer.param_groups for each in group["params"]}
        given = list(dict.fromkeys(params))
        new = [each for each in given if id(each) not in known]
        if len(new) < len(given):
            notice(
                f"{len(given) - len(new)} parameters to unfreeze are in {type(optimizer).__name__} already, and keep "
                "their settings; let configure_optimizers take those with requires_grad alone"
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze ``modules`` and give their parameters to ``optimizer`` as a new group.

        Args:
            lr: of that group; None: that of the first group divided by ``initial_denom_lr``.
            train_bn: give it the parameters of BatchNorm as well.
        """
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        new = BaseFinetuning.filter_on_optimizer(optimizer, BaseFinetuning.filter_params(modules, train_bn=train_bn))
        if new:
            optimizer.add_param_group({"params": new, "lr": rate})

    # The run ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            self._trainer, self._module, self._num_configured = trainer, pl_module, {}
            self.freeze_before_training(pl_module)

    def on_train_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        engine = trainer.engine
        engine.settle()  # parameters as the optimizer holds them
        trained = _trained(engine.module)
        self._note_configured(trainer)
        for optimizer in trainer.optimizers:
            self.finetune_function(pl_module, trainer.current_epoch, optimizer)
        self._extend_schedulers(trainer)
        if _trained(engine.module) != trained:
            engine.trained_parameters_changed()

    def teardown(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        self._trainer = self._module = None
        self._num_configured = {}

    def state_dict(self) -> dict[str, Any]:
        if self._trainer is None or self._trainer.run is None:
            return {}
        network = self._trainer.engine.module
        still = [name for name, each in network.named_modules() if _keeps_statistics(each)]
        return {"trained": _trained(network), "without_statistics": still}

    def check_stored_state(self, state: Any, place: str) -> None:
        """See :class:`roomier.api.callback.ChecksState`."""
        if "trained" in state:  # Lightning's does not have it
            form = {"trained": list_of(text), "without_statistics": list_of(text)}
            fields(form, others=anything)(state, place)

    def places(self, weights: Mapping[str, Tensor], stored: Mapping[str, Any]) -> dict[str, Any]:
        """Give the optimizers the groups they had, and no more: a run that goes back unfreezes again. Nothing is to be
        placed. See :class:`roomier.api.callback.PlacesTensors`."""
        state, trainer = stored.get("callbacks", {}).get(self.state_key), self._trainer
        if not state or "trained" not in state or trainer is None:
            return {}
        network = trainer.engine.module
        parameters, trained = dict(network.named_parameters()), set(state["trained"])
        for name, parameter in parameters.items():
            parameter.requires_grad = name in trained
        still = set(state["without_statistics"])
        for name, each in network.named_modules():
            if isinstance(each, BATCH_NORMS) and (name in still or _keeps_statistics(each)):
                each.track_running_stats = name not in still
        self._note_configured(trainer)
        for optimizer, saved in zip(trainer.optimizers, stored["optimizers"], strict=False):
            _drop_groups(optimizer, max(len(saved["param_groups"]), self._num_configured[optimizer]))
            for group in saved["param_groups"][len(optimizer.param_groups) :]:
                if all(name in parameters for name in group["params"]):  # else the check of the optimizer tells
                    optimizer.add_param_group({**group, "params": [parameters[name] for name in group["params"]]})
        self._extend_schedulers(trainer)
        trainer.engine.trained_parameters_changed()
        return {}

    def _note_configured(self, trainer: TrainerView) -> None:
        """How many groups the optimizers had before anything was unfrozen."""
        for optimizer in trainer.optimizers:
            self._num_configured.setdefault(optimizer, len(optimizer.param_groups))

    @staticmethod
    def _extend_schedulers(trainer: TrainerView) -> None:
        # A scheduler keeps a first rate, and LambdaLR a function, for each group there was when it was made.
        for config in trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
            rates = getattr(scheduler, "base_lrs", None)
            if not isinstance(rates, list):
                continue
            for name in ("base_lrs", "lr_lambdas", "_last_lr", "min_lrs"):
                known = getattr(scheduler, name, None)
                if isinstance(known, list):
                    del known[len(groups) :]  # of groups that are gone
            for group in groups[len(rates) :]:
                group.setdefault("initial_lr", group["lr"])
                rates.append(group["initial_lr"])
                if isinstance(scheduler, LambdaLR):
                    scheduler.lr_lambdas.append(scheduler.lr_lambdas[0])
                for name in ("_last_lr", "min_lrs"):
                    known = getattr(scheduler, name, None)
                    if isinstance(known, list) and known:
                        known.append(group["lr"] if name == "_last_lr" else known[0])


def _drop_groups(optimizer: Optimizer, num_kept: int) -> None:
    """Take the groups behind the first ``num_kept`` away, and what is held for their parameters."""
    for group in optimizer.param_groups[num_kept:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            parameter.grad = None
    del optimizer.param_groups[num_kept:]


def _trained(network: nn.Module) -> list[str]:
    return [name for name, each in network.named_parameters() if each.requires_grad]


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, BATCH_NORMS) and not module.track_running_stats and module.running_mean is not None


def multiplicative(epoch: int) -> float:
    """Twice as much each epoch."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Trains ``pl_module.backbone`` from an epoch on, with a learning rate that grows to that of the rest.

    Args:
        unfreeze_backbone_at_epoch: the epoch, from 0, in which it begins.
        lambda_func: ``epoch -> factor``: the rate of the backbone is multiplied by ``lambda_func(epoch + 1)`` as each
            later epoch begins.
        backbone_initial_ratio_lr: its first rate as a share of that of the first group.
        backbone_initial_lr: its first rate itself, in place of a share.
        should_align: it never gets above that of the first group.
        initial_denom_lr: taken for Lightning's sake; the first rate is always given.
        train_bn: train the BatchNorm of the backbone as well.
        verbose: tell both rates as each epoch begins.
        rounding: of the rates that are told.

    Raises:
        RoomierError: when a fit begins, that the module has no ``backbone``.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def check_stored_state(self, state: Any, place: str) -> None:
        super().check_stored_state(state, place)
        fields({"previous_backbone_lr": optional(finite)}, others=anything)(state, place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]

    def freeze_before_training(self, pl_module: Module) -> None:
        self.freeze(self._backbone(pl_module))

    def finetune_function(self, pl_module: Module, epoch: int, optimizer: Optimizer) -> None:
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        rate = float(optimizer.param_groups[0]["lr"])
        if epoch == self.unfreeze_backbone_at_epoch:
            given = self.backbone_initial_lr
            own = rate * self.backbone_initial_ratio_lr if given is None else given
            self.unfreeze_and_add_param_group(
                self._backbone(pl_module), optimizer, own, self.initial_denom_lr, self.train_bn
            )
        else:
            assert self.previous_backbone_lr is not None
            own = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            if self.should_align:
                own = min(own, rate)
            optimizer.param_groups[-1]["lr"] = own
        self.previous_backbone_lr = own
        if self.verbose:
            notice(f"learning rate {round(rate, self.rounding)}, of the backbone {round(own, self.rounding)}")

    @staticmethod
    def _backbone(pl_module: Module) -> nn.Module:
        backbone = getattr(pl_module, "backbone", None)
        if not isinstance(backbone, nn.Module):
            raise RoomierError(
                "BackboneFinetuning",
                type(pl_module).__name__,
                "has no module named backbone",
                "Call the pretrained part self.backbone, or write a BaseFinetuning",
            )
        return backbone
