"""The parts of a Plan: what is asked of each lever, as frozen values.

A part folds what it receives into one form (aliases, NumPy numbers, lists) but judges nothing: a wrong value
stays as it came, and the Plan that receives the part reports all wrong values of all parts together.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import ClassVar, get_args, get_type_hints

from roomier.plan.choices import canonical

MIN_BUDGET_BYTES = 2**20
"""What is less is no budget for a device but a slip."""


class Options(Mapping[str, object]):
    """Keyword arguments as an immutable, hashable mapping; lists inside become tuples.

    Equal to any mapping with the same items: ``Options({"betas": [0.9, 0.95]}) == {"betas": (0.9, 0.95)}``.
    """

    __slots__ = ("_items",)
    _items: dict[str, object]

    def __init__(self, items: Mapping[str, object] | None = None) -> None:
        folded = {name: _fold_option(value) for name, value in (items or {}).items()}
        object.__setattr__(self, "_items", folded)

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __getitem__(self, name: str) -> object:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[type["Options"], tuple[dict[str, object]]]:
        return Options, (dict(self._items),)


@dataclass(frozen=True)
class Part:
    """What the parts share: a section name, and the folding of what was received."""

    SECTION: ClassVar[str]
    """The part's name in a Plan, in YAML, and before the dot in an error."""

    def __post_init__(self) -> None:
        for name, hint in FIELDS[self.SECTION].items():
            value = canonical(f"{self.SECTION}.{name}", getattr(self, name))
            object.__setattr__(self, name, _fold(value, hint))


@dataclass(frozen=True)
class ParallelPlan(Part):
    """How the work is spread over devices. A rank is one process with one device.

    Args:
        strategy: ``"single"`` (one rank), ``"ddp"``, ``"zero1"``, ``"zero2"``, ``"zero3"``, ``"hsdp"``; or
            ``"auto"``, the fastest plan that fits. The names of the strategies to come are known and refused.
        accelerator: ``"auto"`` (cuda, else mps, else cpu), ``"cpu"``, ``"gpu"`` (cuda, else mps), ``"cuda"``,
            ``"mps"``.
        devices: ranks on each node.
        num_nodes: number of machines.
        shard_size: of ``"hsdp"``, how many ranks share one copy of the model; None is the ranks of a node.
        reduce_dtype: in which numbers gradients are added up over the ranks: ``"32"``, or ``"bf16"`` for half the
            bytes on the way.
        gradient_compression: of ``"ddp"``: ``"none"`` or ``"powersgd"`` (Vogels et al. 2019, with error feedback).
        compression_rank: of ``"powersgd"``: a gradient of n x m numbers travels as this many times n + m; None is 4.
        compression_warmup_steps: steps of each run in which gradients travel whole, at least 3; None is 100.
        find_unused_parameters: a step may leave out parameters that another step, or another rank, uses. What the first
            step leaves out on every rank needs no setting.
    """

    SECTION: ClassVar[str] = "parallel"
    strategy: str = "single"
    accelerator: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    shard_size: int | None = None
    reduce_dtype: str = "32"
    gradient_compression: str = "none"
    compression_rank: int | None = None
    compression_warmup_steps: int | None = None
    find_unused_parameters: bool = False

    @property
    def num_ranks(self) -> int:
        return self.devices * self.num_nodes

    @property
    def num_shards(self) -> int:
        """Among how many ranks one copy of the optimizer states is cut."""
        if self.strategy in ("single", "ddp", "auto"):
            return 1
        return (self.shard_size or self.devices) if self.strategy == "hsdp" else self.num_ranks


@dataclass(frozen=True)
class PrecisionPlan(Part):
    """In which numbers the model is kept and computed. The default rounds nothing below float32.

    Args:
        mode: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"`` (with a gradient scaler), ``"bf16-true"``,
            ``"64-true"``. ``16``, ``"bf16"``, ``32``, ``64`` mean what they mean in Lightning.
        matmul: ``"highest"``, ``"high"``, ``"medium"``, as in ``torch.set_float32_matmul_precision``.
    """

    SECTION: ClassVar[str] = "precision"
    mode: str = "32-true"
    matmul: str = "highest"


@dataclass(frozen=True)
class BatchPlan(Part):
    """How one optimizer step is made of micro-batches, and how its gradient is clipped.

    Args:
        accumulate_grad_batches: micro-batches per optimizer step.
        gradient_clip_val: the bound, above 0; None clips nothing.
        gradient_clip_algorithm: ``"norm"`` (the norm over all parameters) or ``"value"`` (each element).
    """

    SECTION: ClassVar[str] = "batch"
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"

    @property
    def clips_norm(self) -> bool:
        """Whether the norm over all gradients is bounded."""
        return self.gradient_clip_val is not None and self.gradient_clip_algorithm == "norm"


@dataclass(frozen=True)
class OptimizerPlan(Part):
    """The optimizer and its schedule by name, for models without a ``configure_optimizers`` of their own.

    Args:
        name: ``"adamw"``, ``"adam"``, ``"sgd"``, ``"adafactor"``, ``"rmsprop"``, ``"adagrad"``, ``"nadam"``,
            ``"radam"``, ``"adamw8bit"``, ``"adamw4bit"`` (states in 8 or 4 bits), ``"lion"``, ``"muon"`` (with AdamW
            for what is no hidden matrix), ``"onebit_adam"`` (option ``freeze_step``); None leaves the choice to the
            module's ``configure_optimizers``.
        lr: the (highest) learning rate; None takes that of the ``torch.optim`` class.
        weight_decay: None takes that of the ``torch.optim`` class.
        options: further keyword arguments of that class (``{"betas": (0.9, 0.95)}``); immutable, lists become
            tuples. Whether the class knows them is checked when the optimizer is made.
        schedule: ``"constant"``, ``"linear"``, ``"cosine"``, set anew each optimizer step; None keeps ``lr``.
        warmup_steps: optimizer steps in which the learning rate rises linearly to ``lr``; needs a schedule.
        min_lr_ratio: where ``"linear"`` and ``"cosine"`` end, as a share of ``lr``, in [0, 1].
        weight_rounding: how ``"bf16-true"`` keeps weights: ``"split"`` (16 more bits beside each: updates as of fp32
            weights), ``"stochastic"``, ``"nearest"`` (small updates are lost); None is ``"split"``.
        step_in_backward: each parameter is updated when its gradient is complete, which is then freed: ``"none"``;
            ``"exact"`` (where the norm of all gradients is clipped, a first backward finds it); ``"stale_norm"``
            (clips by the norm of the step before).
    """

    SECTION: ClassVar[str] = "optimizer"
    name: str | None = None
    lr: float | None = None
    weight_decay: float | None = None
    options: Mapping[str, object] = dataclasses.field(default_factory=Options)
    schedule: str | None = None
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    weight_rounding: str | None = None
    step_in_backward: str = "none"


@dataclass(frozen=True)
class ActivationPlan(Part):
    """What is kept of the forward pass for backward; the rest is computed again. By block, the layer that repeats.

    Args:
        policy: ``"none"``: every activation is kept. ``"full"``: of each block its input alone. ``"every_n"``: the same
            for one block of every ``every_n``. ``"selective"``: of each block its input and the results of matrix
            products and attention. ``"budget"``: each block keeps all, these results, or its input alone, so that the
            peak stays within the budget at the least computation; with ``offload.activations`` also all in host memory,
            where copies cost less time.
        every_n: of ``"every_n"``; None is 2.
        budget_bytes: of ``"budget"``: how many bytes all tensors on the device may take together, at the peak of a
            step.
        budget_fraction: of ``"budget"``, instead: in [0, 1], where between the peak with all blocks computed again (0)
            and that with none (1) the budget lies.
    """

    SECTION: ClassVar[str] = "activation"
    policy: str = "none"
    every_n: int | None = None
    budget_bytes: int | None = None
    budget_fraction: float | None = None


@dataclass(frozen=True)
class OffloadPlan(Part):
    """What leaves the device between its uses: ``"none"`` for each.

    Args:
        optimizer_states: where the optimizer's states live.
        parameters: where the parameters live.
        activations: ``"cpu"``: what blocks keep for backward waits in host memory (pinned where the device is a GPU).
            With a budget, that of the blocks it chooses; there the device must be a GPU.
    """

    SECTION: ClassVar[str] = "offload"
    optimizer_states: str = "none"
    parameters: str = "none"
    activations: str = "none"


@dataclass(frozen=True)
class LossPlan(Part):
    """How the loss of a language model is computed.

    Args:
        chunked: logits and their cross-entropy are computed for some tokens at a time and never whole in memory.
        chunk_tokens: how many; None takes as many as make logits of 64 MiB.
    """

    SECTION: ClassVar[str] = "loss"
    chunked: bool = False
    chunk_tokens: int | None = None


@dataclass(frozen=True)
class AttentionPlan(Part):
    """Which kernel ``scaled_dot_product_attention`` takes.

    Args:
        kernel: ``"auto"`` (torch chooses), ``"flash"``, ``"efficient"``, ``"cudnn"``, ``"math"``.
    """

    SECTION: ClassVar[str] = "attention"
    kernel: str = "auto"


@dataclass(frozen=True)
class AdapterPlan(Part):
    """Low-rank adapters on linear layers (LoRA, Hu et al. 2021): all else of the model is frozen.

    Args:
        lora_rank: inner width ``r`` of the adapters; None adds none.
        lora_alpha: their output is scaled by ``alpha / r``; None is ``r``.
        lora_dropout: probability on their input.
        lora_targets: ``"blocks"`` (all linear layers of the blocks), or names separated by commas: a layer is adapted
            if its qualified name ends in one of them, wildcards as in :mod:`fnmatch`.
        lora_trained: modules, named likewise, that are trained whole beside the adapters: a new output layer, say.
        frozen_base: in which numbers the adapted layers keep their frozen weights: ``"as_is"``, ``"int8"``, ``"nf4"``.
    """

    SECTION: ClassVar[str] = "adapter"
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    lora_targets: str = "blocks"
    lora_trained: str = ""
    frozen_base: str = "as_is"


@dataclass(frozen=True)
class CompilePlan(Part):
    """Whether the model's blocks are compiled.

    Args:
        enabled: compile each block with ``torch.compile``; equal blocks are compiled once.
    """

    SECTION: ClassVar[str] = "compile"
    enabled: bool = False


@dataclass(frozen=True)
class ChoicePlan(Part):
    """What the planner may choose, and within what. Settled before the run is built.

    Args:
        memory_budget_bytes: what a device may hold at the peak of a step; None is all of the device. With a strategy by
            name, a run that is forecast to need more is refused before it begins.
        allowed: of ``"auto"``: choices that it may take in addition, separated by commas: precisions
            (``"bf16-mixed"``), optimizers (``"adamw8bit"``) and ``"chunked_loss"``. Without, ``"auto"`` takes exact
            choices, and splits the sum over the batch by strategy and micro-batch.
    """

    SECTION: ClassVar[str] = "choice"
    memory_budget_bytes: int | None = None
    allowed: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """``allowed`` in single words."""
        return tuple(word.strip() for word in self.allowed.split(",") if word.strip())


PARTS: dict[str, type[Part]] = {
    part.SECTION: part
    for part in (
        ParallelPlan,
        PrecisionPlan,
        BatchPlan,
        OptimizerPlan,
        ActivationPlan,
        OffloadPlan,
        LossPlan,
        AttentionPlan,
        AdapterPlan,
        CompilePlan,
        ChoicePlan,
    )
}
"""Section name -> part, in the order in which a Plan lists them."""

FIELDS: dict[str, dict[str, object]] = {
    section: {field.name: hints[field.name] for field in dataclasses.fields(part)}
    for section, part in PARTS.items()
    for hints in [get_type_hints(part)]  # slow: once for each part
}
"""Section name -> field name -> annotated type."""


def _fold(value: object, hint: object) -> object:
    """``value`` as the plain Python value that ``hint`` names, or untouched where it is something else."""
    wanted = get_args(hint) or (hint,)
    if isinstance(value, Mapping) and Mapping[str, object] == hint:
        return Options(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Integral) and int in wanted:
        return int(value)
    if isinstance(value, Real) and float in wanted:
        return _as_float(value)
    return value


def _fold_option(value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return _as_float(value)
    if isinstance(value, (list, tuple)):
        return tuple(_fold_option(element) for element in value)
    return value


def _as_float(value: Real) -> object:
    try:
        return float(value)
    except OverflowError:  # an integer beyond float's range: left as it is, so that the Plan refuses it
        return value
