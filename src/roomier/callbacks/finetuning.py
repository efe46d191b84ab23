"""BaseFinetuning and BackboneFinetuning: callbacks that initially freeze parts of a model and train them later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.core.batch_norms import BATCH_NORMS
from roomier.core.errors import RoomierError
from roomier.core.forms import anything, fields, finite, list_of, optional, text
from roomier.core.log import notice

Modules = nn.Module | Iterable[Any]
"""A module, or modules in nested lists."""


class BaseFinetuning(Callback):
    """Base class for callbacks that freeze parameters before the optimizers are created and unfreeze them later.

    Override :meth:`freeze_before_training` and :meth:`finetune_function`. The method names are the same as in
    Lightning. The module's ``configure_optimizers`` must pass only parameters with ``requires_grad`` to the optimizer.

    A resumed run restores the parameter groups and the frozen parts of the saved run. Unfreezing is also supported with
    ``ddp`` and with sharded parameters.

    Example:
        >>> class UnfreezeEncoder(BaseFinetuning):
        ...     def freeze_before_training(self, pl_module):
        ...         self.freeze(pl_module.encoder)
        ...
        ...     def finetune_function(self, pl_module, epoch, optimizer):
        ...         if epoch == 3:
        ...             self.unfreeze_and_add_param_group(pl_module.encoder, optimizer)
    """

    def __init__(self) -> None:
        self._trainer: TrainerView | None = None
        self._module: Any = None
        self._num_configured: dict[Optimizer, int] = {}

    # Methods to override -----------------------------------------------------------------------------------------

    def freeze_before_training(self, pl_module: Module) -> None:
        """Freeze the modules that are not trained at first, for example with ``self.freeze(pl_module.backbone)``."""
        raise self._undefined("freeze_before_training", "(self, pl_module): self.freeze(pl_module.backbone)")

    def finetune_function(self, pl_module: Module, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze modules with :meth:`unfreeze_and_add_param_group`. This method is called for each optimizer when an
        epoch starts.

        Args:
            epoch: the epoch that starts, counted from 0.
        """
        definition = "(self, pl_module, epoch, optimizer) with self.unfreeze_and_add_param_group(...)"
        raise self._undefined("finetune_function", definition)

    def _undefined(self, name: str, definition: str) -> RoomierError:
        return RoomierError(name, type(self).__name__, "is not defined by the callback", f"Define {name}{definition}")

    # Methods to call ---------------------------------------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return ``modules`` and their descendants, except modules that have children but directly own no
        parameters."""
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
        """Yield the parameters of ``modules`` whose ``requires_grad`` equals the given value.

        Args:
            train_bn: if True, include the parameters of BatchNorm.
        """
        for each in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(each, BATCH_NORMS):
                yield from (p for p in each.parameters(recurse=False) if p.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze the parameters of ``modules``. BatchNorm modules update their running statistics again."""
        for each in BaseFinetuning.flatten_modules(modules):
            if isinstance(each, BATCH_NORMS):
                each.track_running_stats = True
            for parameter in each.parameters(recurse=False):
                parameter.requires_grad = True

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters that ``module`` directly owns, but not the parameters of its children. A BatchNorm
        module stops updating its running statistics.
        """
        if isinstance(module, BATCH_NORMS):
            module.track_running_stats = False
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze ``modules``. With ``train_bn``, BatchNorm modules remain trainable."""
        for each in BaseFinetuning.flatten_modules(modules):
            if isinstance(each, BATCH_NORMS) and train_bn:
                BaseFinetuning.make_trainable(each)
            else:
                BaseFinetuning.freeze_module(each)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters in ``params`` that ``optimizer`` does not contain yet.

        Print a notice if the optimizer already contains some of these parameters.
        """
        known = {id(each) for group in optimizer.param_groups for each in group["params"]}
        given = list(dict.fromkeys(params))
        new = [each for each in given if id(each) not in known]
        if len(new) < len(given):
            notice(
                f"{type(optimizer).__name__} already contains {len(given) - len(new)} of the parameters to unfreeze. "
                "These parameters keep their settings. In configure_optimizers, pass only parameters with "
                "requires_grad"
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
        """Unfreeze ``modules`` and add their parameters to ``optimizer`` as a new group.

        Args:
            lr: learning rate of the new group; None uses the rate of the first group divided by ``initial_denom_lr``.
            train_bn: if True, include the parameters of BatchNorm.
        """
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        new = BaseFinetuning.filter_on_optimizer(optimizer, BaseFinetuning.filter_params(modules, train_bn=train_bn))
        if new:
            optimizer.add_param_group({"params": new, "lr": rate})

    # Hooks of the run --------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            self._trainer, self._module, self._num_configured = trainer, pl_module, {}
            self.freeze_before_training(pl_module)

    def on_train_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        engine = trainer.engine
        engine.settle()  # apply pending updates
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
        without_statistics = [name for name, each in network.named_modules() if _keeps_statistics(each)]
        return {"trained": _trained(network), "without_statistics": without_statistics}

    def check_stored_state(self, state: Any, place: str) -> None:
        """See :class:`roomier.api.callback.ChecksState`."""
        if "trained" in state:  # absent from Lightning's checkpoints
            form = {"trained": list_of(text), "without_statistics": list_of(text)}
            fields(form, others=anything)(state, place)

    def places(self, weights: Mapping[str, Tensor], stored: Mapping[str, Any]) -> dict[str, Any]:
        """Restore the parameter groups of the saved run and remove parameter groups that were added later.

        A run that returns to an earlier checkpoint can therefore add the removed groups again. Returns an empty dict,
        because this callback places no tensors. See :class:`roomier.api.callback.PlacesTensors`.
        """
        state, trainer = stored.get("callbacks", {}).get(self.state_key), self._trainer
        if not state or "trained" not in state or trainer is None:
            return {}
        network = trainer.engine.module
        parameters, trained = dict(network.named_parameters()), set(state["trained"])
        for name, parameter in parameters.items():
            parameter.requires_grad = name in trained
        without_statistics = set(state["without_statistics"])
        for name, each in network.named_modules():
            if isinstance(each, BATCH_NORMS) and (name in without_statistics or _keeps_statistics(each)):
                each.track_running_stats = name not in without_statistics
        self._note_configured(trainer)
        for optimizer, saved in zip(trainer.optimizers, stored["optimizers"], strict=False):
            _drop_groups(optimizer, max(len(saved["param_groups"]), self._num_configured[optimizer]))
            for group in saved["param_groups"][len(optimizer.param_groups) :]:
                if all(name in parameters for name in group["params"]):  # a later check reports unknown names
                    optimizer.add_param_group({**group, "params": [parameters[name] for name in group["params"]]})
        self._extend_schedulers(trainer)
        trainer.engine.trained_parameters_changed()
        return {}

    def _note_configured(self, trainer: TrainerView) -> None:
        """Record the number of groups that each optimizer had before any parameter was unfrozen."""
        for optimizer in trainer.optimizers:
            self._num_configured.setdefault(optimizer, len(optimizer.param_groups))

    @staticmethod
    def _extend_schedulers(trainer: TrainerView) -> None:
        # A scheduler stores an initial rate, and LambdaLR also stores a function, for each group that existed when the
        # scheduler was created.
        for config in trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
            if not isinstance(getattr(scheduler, "base_lrs", None), list):
                continue
            for name in ("base_lrs", "lr_lambdas", "_last_lr", "min_lrs"):
                known = getattr(scheduler, name, None)
                if not isinstance(known, list):
                    continue
                del known[len(groups) :]  # entries of removed groups
                for group in groups[len(known) :] if known else ():
                    rate = {"base_lrs": group.setdefault("initial_lr", group["lr"]), "_last_lr": group["lr"]}
                    known.append(rate.get(name, known[0]))


def _drop_groups(optimizer: Optimizer, num_kept: int) -> None:
    """Remove the groups after the first ``num_kept``, with the states and gradients of their parameters."""
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
    """Return 2.0, the default factor by which the learning rate of the backbone changes per epoch."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Callback that trains ``pl_module.backbone`` from a given epoch on. The learning rate of the backbone increases to
    the rate of the first parameter group.

    Args:
        unfreeze_backbone_at_epoch: epoch in which training of the backbone starts, counted from 0.
        lambda_func: function that maps an epoch to a factor. At the start of each later epoch, the learning rate of
            the backbone is multiplied by ``lambda_func(epoch + 1)``.
        backbone_initial_ratio_lr: initial rate of the backbone, as a fraction of the rate of the first group.
        backbone_initial_lr: initial rate of the backbone; takes precedence over ``backbone_initial_ratio_lr``.
        should_align: if True, limit the rate of the backbone to the rate of the first group.
        initial_denom_lr: accepted for compatibility with Lightning, but ignored, because the initial rate of the
            backbone is always set.
        train_bn: if True, also train the BatchNorm layers of the backbone.
        verbose: if True, print both rates when an epoch starts.
        rounding: number of decimal places of the printed rates.

    Raises:
        RoomierError: the module has no ``backbone`` when a fit starts.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=3)])
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
            notice(f"learning rate {round(rate, self.rounding)}, backbone {round(own, self.rounding)}")

    @staticmethod
    def _backbone(pl_module: Module) -> nn.Module:
        backbone = getattr(pl_module, "backbone", None)
        if not isinstance(backbone, nn.Module):
            problem = "must have an attribute 'backbone' that is a module"
            action = "Name the pretrained part self.backbone, or subclass BaseFinetuning"
            raise RoomierError("BackboneFinetuning", type(pl_module).__name__, problem, action)
        return backbone
