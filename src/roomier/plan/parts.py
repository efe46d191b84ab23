"""The parts of a Plan, as frozen values.

A part normalizes its values (aliases, NumPy numbers, lists) but does not validate them. An invalid value stays
unchanged, and the Plan reports the invalid values of all parts together.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import ClassVar, TypeVar, get_args, get_type_hints

from roomier.core.mesh import Mesh
from roomier.core.world import World
from roomier.plan.choices import canonical

MIN_BUDGET_BYTES = 2**20
"""Smallest memory budget that is accepted for a device. A smaller number is probably missing its unit, such as GiB."""


class Options(Mapping[str, object]):
    """Keyword arguments of an optimizer as an immutable, hashable mapping. Lists in the options are converted to
    tuples.

    Options are equal to any mapping with equal items.

    Example:
        >>> Options({"betas": [0.9, 0.95]}) == {"betas": (0.9, 0.95)}  # True

    Args:
        items: the keyword arguments.
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
    """Base class of the parts of a Plan. The constructor of a part normalizes the values of all fields."""

    SECTION: ClassVar[str]
    """Name of the part in a Plan, in YAML, and before the dot in error messages: ``"loss"`` for ``LossPlan``."""

    def __init_subclass__(cls) -> None:
        if cls.__base__ is Part:
            cls.SECTION = cls.__name__.removesuffix("Plan").lower()

    def __post_init__(self) -> None:
        for name, hint in FIELDS[self.SECTION].items():
            value = canonical(f"{self.SECTION}.{name}", getattr(self, name))
            object.__setattr__(self, name, _fold(value, hint))


@dataclass(frozen=True)
class ParallelPlan(Part):
    """Distribution of the work over devices. A rank is one process with one device.

    Attributes:
        strategy: ``"single"`` (one rank), ``"ddp"`` (each rank stores a full replica), ``"zero1"`` (optimizer states
            are sharded), ``"zero2"`` (gradients are also sharded), ``"zero3"`` (parameters are also sharded),
            ``"hsdp"`` (zero3 within groups of ranks), or ``"auto"`` (the fastest plan that fits). The Trainer also
            accepts ``"zero2+offload"`` (host memory) and ``"zero2+disk"``, which set ``offload.optimizer_states``.
        accelerator: ``"auto"`` (the accelerator of this machine if it has one, otherwise the CPU), ``"gpu"`` (the
            accelerator of this machine), ``"cpu"``, ``"cuda"`` (also ROCm), ``"mps"``, ``"xpu"``, ``"npu"`` (requires
            the torch-npu package), ``"tpu"`` (requires the torch-tpu package), or another accelerator that a package
            adds to torch.
        devices: number of ranks on each machine.
        num_nodes: number of machines.
        context_parallel_size: number of consecutive ranks that share each sequence, so that each rank saves the
            activations of only a slice of the sequence. The size must divide both the number of ranks and the number of
            attention heads. With 1, each rank has its own sequences.
        pipeline_parallel_size: with ``"ddp"`` and ``"zero1"`` to ``"zero3"``, number of ranks across which the model is
            split into stages of consecutive layers. The number of ranks divided by this size is the number of
            data-parallel replicas. With 1, each rank computes the full model.
        schedule: with a ``pipeline_parallel_size``, order of the forward and backward passes on a rank. ``"gpipe"``
            runs all forward passes of a step before the backward passes. ``"1f1b"`` alternates between them, so a rank
            stores the activations of at most ``pipeline_parallel_size`` micro-batches. ``"interleaved_1f1b"`` requires
            ``stages_per_rank`` greater than 1. None means ``"1f1b"``.
        stages_per_rank: with ``"interleaved_1f1b"``, number of stages on each rank. With more stages, ranks wait less
            for each other, but send more messages. The model has ``pipeline_parallel_size * stages_per_rank`` stages.
        split: with a ``pipeline_parallel_size``, comma-separated names of the modules at which the second and all later
            stages begin, such as ``"blocks.3,blocks.6"``; the Trainer also accepts a list. With an empty string,
            roomier selects modules for which the slowest stage is as fast as possible.
        shard_size: with ``"hsdp"``, number of ranks across which one replica of the model is sharded. None selects the
            number of ranks on one machine.
        reduce_dtype: dtype in which gradients are reduced across ranks: ``"32"``, or ``"bf16"``, which halves the
            communication volume.
        gradient_compression: ``"none"`` or, with ``"ddp"``, ``"powersgd"`` (Vogels et al. 2019, with error feedback).
        compression_rank: with ``"powersgd"``, rank of the approximation: a gradient of shape ``(n, m)`` is sent as
            ``compression_rank * (n + m)`` numbers. None means 4.
        compression_warmup_steps: with ``"powersgd"``, number of steps at the start of each run in which gradients are
            not compressed; at least 3. None means 100.
        communication: with a sharded strategy, timing of the transfers between ranks. ``"overlapped"`` all-gathers a
            unit during the computation of the previous unit, and reduces gradients during the computation of the next
            unit. ``"sequential"`` completes each transfer before the computation continues, so fewer buffers exist at
            the same time. On accelerators, only the all-gathers in the backward pass are sequential.
        find_unused_parameters: if True, support models that use different parameters in different steps or on different
            ranks, such as a mixture of experts. A rank that has no gradient for a parameter contributes zeros. A
            parameter that has no gradient on any rank is not updated. With a sharded strategy, ranks also all-gather
            units that they skip, and transfers are sequential. This option is not required for parameters that no rank
            uses in any step.
    """

    strategy: str = "single"
    accelerator: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    schedule: str | None = None
    stages_per_rank: int = 1
    split: str = ""
    shard_size: int | None = None
    reduce_dtype: str = "32"
    gradient_compression: str = "none"
    compression_rank: int | None = None
    compression_warmup_steps: int | None = None
    communication: str = "overlapped"
    find_unused_parameters: bool = False

    @property
    def may_skip_units(self) -> bool:
        """True if ranks may skip units of a sharded model. Unused parameters are then known only after the backward
        pass.
        """
        return self.find_unused_parameters and self.strategy not in ("single", "ddp", "auto")

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all machines."""
        return self.devices * self.num_nodes

    @property
    def num_shards(self) -> int:
        """Number of ranks across which one replica of the optimizer states, or of those of a stage, is sharded."""
        if self.strategy in ("single", "ddp", "auto"):
            return 1
        if self.strategy == "hsdp":
            return self.shard_size or self.devices
        return self.num_ranks // self.pipeline_parallel_size

    @property
    def num_peers(self) -> int:
        """Number of ranks that read the same samples."""
        return self.context_parallel_size * self.pipeline_parallel_size

    @property
    def schedule_of_stages(self) -> str:
        """Order of the passes with a ``pipeline_parallel_size``."""
        return self.schedule or "1f1b"

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return self.pipeline_parallel_size * self.stages_per_rank

    @property
    def num_data_ranks(self) -> int:
        """Number of groups of ranks that read different samples."""
        return self.num_ranks // self.num_peers

    def mesh_on(self, world: World) -> Mesh:
        """Return the arrangement of the ranks of ``world``."""
        context = self.context_parallel_size
        return Mesh(world, context=context, shard=max(1, self.num_shards // context), stage=self.pipeline_parallel_size)


@dataclass(frozen=True)
class PrecisionPlan(Part):
    """Number formats of weights and computation. By default, all computation is in float32.

    Attributes:
        mode: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"`` (with a loss scale), ``"bf16-true"`` or ``"64-true"``, as
            in Lightning. The aliases ``16``, ``"bf16"``, ``32`` and ``64`` are accepted.
        matmul: precision of float32 matmuls: ``"highest"`` (float32), ``"high"`` (TF32) or ``"medium"`` (bfloat16), as
            in ``torch.set_float32_matmul_precision``.
    """

    mode: str = "32-true"
    matmul: str = "highest"


@dataclass(frozen=True)
class BatchPlan(Part):
    """Gradient accumulation, gradient clipping, and the random numbers of a step.

    Attributes:
        accumulate_grad_batches: number of micro-batches per optimizer step. The step uses the gradient of the full
            batch.
        gradient_clip_val: upper limit for the gradient norm or for each element of the gradients; must be positive.
            None disables clipping.
        gradient_clip_algorithm: ``"norm"`` (limits the norm over all parameters) or ``"value"`` (limits each element).
        seeding: ``"stream"``: the generators continue from one step to the next. ``"events"``: the generators are
            seeded at the start of each micro-batch from (seed, step, data rank, micro-batch), and in each block from a
            number that is drawn when the block is called. Dropout masks then do not depend on earlier steps.
    """

    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    seeding: str = "stream"

    @property
    def clips_norm(self) -> bool:
        """True if the norm over all gradients is clipped."""
        return self.gradient_clip_val is not None and self.gradient_clip_algorithm == "norm"


@dataclass(frozen=True)
class OptimizerPlan(Part):
    """Optimizer and schedule, selected by name, for models that do not define ``configure_optimizers``.

    Attributes:
        name: a name in ``roomier.plan.choices.OPTIMIZERS``, such as ``"adamw"``, ``"adamw8bit"`` (states in 8 bits),
            ``"muon"`` (with AdamW for parameters other than hidden matrices) or ``"onebit_adam"`` (with the
            ``freeze_step`` option). ``roomier fit --help=optimizer`` lists all names. None uses the module's
            ``configure_optimizers``.
        lr: learning rate; with a schedule, the peak learning rate. None selects the default of the optimizer class.
        weight_decay: weight decay coefficient. None selects the default of the optimizer class.
        options: additional keyword arguments of the optimizer class, such as ``{"betas": (0.9, 0.95)}``. Adam and AdamW
            also accept ``{"bias_correction": False}``. AdamW also accepts ``{"cautious": True}``, which uses only the
            elements of an update that have the sign of the gradient (Liang et al. 2024, arXiv 2411.16085). The options
            are checked when the optimizer is created.
        schedule: ``"constant"``, ``"linear"`` or ``"cosine"``; the learning rate is updated in each optimizer step.
            None keeps it constant at ``lr``.
        warmup_steps: number of optimizer steps over which the learning rate increases to ``lr``, linearly unless
            ``log_warmup`` is set. Requires a schedule.
        min_lr_ratio: learning rate at the end of ``"linear"`` and ``"cosine"``, as a fraction of ``lr`` in [0, 1].
        log_warmup: if True, the learning rate in the warm-up increases with the logarithm of the step, as in DeepSpeed.
        decay_steps: number of optimizer steps, including the warm-up, after which ``"linear"`` and ``"cosine"`` end.
            None selects the number of steps in the run.
        weight_rounding: storage of updated weights with ``"bf16-true"``. ``"split"`` stores the 16 bits that bfloat16
            lacks in a second tensor, so updates are the same as with float32 weights. ``"stochastic"`` rounds up or
            down at random. ``"nearest"`` loses small updates. None means ``"split"``.
        step_in_backward: ``"exact"`` and ``"stale_norm"`` update each parameter in the backward pass as soon as its
            gradient is complete, and then free the gradient. If the gradient norm is clipped, ``"exact"`` computes the
            norm in an additional backward pass, and ``"stale_norm"`` uses the norm of the previous step. ``"none"``
            updates all parameters after the backward pass.
    """

    name: str | None = None
    lr: float | None = None
    weight_decay: float | None = None
    options: Mapping[str, object] = dataclasses.field(default_factory=Options)
    schedule: str | None = None
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    log_warmup: bool = False
    decay_steps: int | None = None
    weight_rounding: str | None = None
    step_in_backward: str = "none"


@dataclass(frozen=True)
class ActivationPlan(Part):
    """Activations that are saved for backward. All others are recomputed. Policies apply to blocks (repeated layers).

    Attributes:
        policy: ``"none"`` saves all activations. ``"full"`` saves the input of each block. ``"every_n"`` saves only the
            input of every ``every_n``-th block, and all activations of the other blocks. ``"selective"`` saves the
            input of each block and the results of matmuls and attention. ``"budget"`` selects one of these policies for
            each block, so that the peak memory stays within the budget with the least recomputation. With
            ``offload.activations``, ``"budget"`` also moves activations to host memory if this is faster than
            recomputation.
        every_n: with ``"every_n"``, every ``every_n``-th block is recomputed. None means 2.
        budget_bytes: with ``"budget"``, upper limit in bytes for all tensors on the device at the peak of a step.
        budget_fraction: with ``"budget"``, a number in [0, 1] as an alternative to ``budget_bytes``: 0 corresponds to
            the peak memory with all blocks recomputed, and 1 to the peak memory without recomputation.
    """

    policy: str = "none"
    every_n: int | None = None
    budget_bytes: int | None = None
    budget_fraction: float | None = None


@dataclass(frozen=True)
class OffloadPlan(Part):
    """Tensors that are stored in a lower tier between their uses: host memory (``"cpu"``, pinned if the device is an
    accelerator) or ``"disk"``. ``"none"`` keeps the tensors on the device.

    Tensors move in units. A unit consists of the parameters of one block. On a CPU, parameters and optimizer states
    are already in host memory, so a run there does not offload them to ``"cpu"`` and prints a notice. The Trainer's
    ``offload`` argument also accepts the tier of the optimizer states as a string. True means ``"cpu"``.

    Attributes:
        optimizer_states: tier of the optimizer states. The optimizer updates one unit at a time on the device.
        parameters: tier of the parameters and their gradients, with the strategies ``"single"``, ``"zero3"`` and
            ``"hsdp"``. The parameters of a block are moved to the device for the computation of this block.
        activations: tier of the activations that blocks save for the backward pass. With the policy ``"budget"``, only
            the activations of selected blocks are moved.
        folder: folder for the files of the disk tier, on a local disk of each machine. None selects a folder for
            temporary files.
        share: fraction in [0, 1] of each rank's optimizer states, in bytes, that is stored in the lower tier, rounded
            to full units. The rest stays on the device.
        update: time at which blocks are updated. The results of all modes are bit-identical. ``"plain"`` updates the
            blocks one by one after the backward pass. ``"deferred"`` updates each block immediately before its next
            forward pass, during the computation of earlier blocks. ``"speculative"`` updates each block in the last
            backward pass, before the norm of the gradients is known. If the norm requires clipping, the update is
            repeated from the previous states. ``"auto"`` selects one of these modes.
        buffers: number of buffers in host memory for optimizer states on disk. With 3, the states of one unit can be
            read while the states of a second unit are updated and the states of a third unit are written. With 1,
            states are read when they are needed, and the buffer is freed between updates. A single buffer therefore
            needs the least memory, but each update waits for the disk.
    """

    optimizer_states: str = "none"
    parameters: str = "none"
    activations: str = "none"
    folder: str | None = None
    share: float = 1.0
    update: str = "auto"
    buffers: int = 3

    @property
    def uses_disk(self) -> bool:
        """True if tensors are stored on disk."""
        return "disk" in (self.optimizer_states, self.parameters, self.activations)


@dataclass(frozen=True)
class LossPlan(Part):
    """Computation of the loss of a language model.

    Attributes:
        chunked: if True, compute logits and cross-entropy for one chunk of tokens at a time, so that the logits of all
            tokens are never in memory at the same time.
        chunk_tokens: number of tokens per chunk. None selects the number of tokens whose logits occupy 64 MiB.
    """

    chunked: bool = False
    chunk_tokens: int | None = None


@dataclass(frozen=True)
class AttentionPlan(Part):
    """Kernel of ``scaled_dot_product_attention``.

    Attributes:
        kernel: ``"auto"`` (torch selects the kernel), ``"flash"``, ``"efficient"``, ``"cudnn"`` or ``"math"``.
    """

    kernel: str = "auto"


@dataclass(frozen=True)
class AdapterPlan(Part):
    """Low-rank adapters on linear layers (LoRA, Hu et al. 2021). All other parameters are frozen, except in the modules
    that ``lora_trained`` names.

    Attributes:
        lora_rank: rank ``r`` of the adapters. None adds no adapters.
        lora_alpha: numerator of the factor ``lora_alpha / r``, by which the output of an adapter is scaled. None means
            ``r``.
        lora_dropout: dropout probability on the input of an adapter.
        lora_targets: ``"blocks"`` (all linear layers of the blocks), or comma-separated names. A layer gets an adapter
            if its qualified name ends with one of the names. Wildcards of :mod:`fnmatch` are accepted.
        lora_trained: names of modules whose parameters are all trained, such as a new output layer, in the same form as
            ``lora_targets``.
        frozen_base: number format of the frozen weights of adapted layers: ``"as_is"``, ``"int8"`` or ``"nf4"``.
    """

    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    lora_targets: str = "blocks"
    lora_trained: str = ""
    frozen_base: str = "as_is"


@dataclass(frozen=True)
class CompilePlan(Part):
    """Compilation of the model's blocks.

    Attributes:
        enabled: if True, compile each block with ``torch.compile``. Identical blocks are compiled once.
        backend: backend of ``torch.compile``, such as ``"aot_eager"``. None selects ``"inductor"``.
        mode: mode of the backend ``"inductor"``, such as ``"max-autotune"``. None selects ``"default"``.
    """

    enabled: bool = False
    backend: str | None = None
    mode: str | None = None


@dataclass(frozen=True)
class ChoicePlan(Part):
    """Limits that the planner applies before a run starts.

    Attributes:
        memory_budget_bytes: upper limit for the peak memory of each device in a step. None means all memory of the
            device. With a named strategy, roomier rejects a run before it starts if the forecast exceeds the limit.
        allowed: with ``"auto"``, additional choices that the planner may use, separated by commas: precisions
            (``"bf16-mixed"``), optimizers (``"adamw8bit"``) and memory techniques that are not exact
            (``"chunked_loss"``). By default, ``"auto"`` changes only the strategy, the micro-batch size, and options
            with the label exact.
    """

    memory_budget_bytes: int | None = None
    allowed: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """The elements of ``allowed``."""
        return tuple(word.strip() for word in self.allowed.split(",") if word.strip())


@dataclass(frozen=True)
class PlanParts:
    """The parts of a Plan. :class:`roomier.Plan`, which is derived from this class, also validates them.

    Attributes:
        parallel: devices, and distribution of the work across the devices.
        precision: number formats of weights and matmuls.
        batch: gradient accumulation and clipping.
        optimizer: optimizer and schedule, selected by name.
        activation: activations that are saved for backward.
        offload: tensors that are moved from the device to other storage between their uses.
        loss: computation of the loss of a language model.
        attention: attention kernel.
        adapter: low-rank adapters on a frozen model.
        compile: compilation of blocks.
        choice: limits for the planner.
    """

    parallel: ParallelPlan = field(default_factory=ParallelPlan)
    precision: PrecisionPlan = field(default_factory=PrecisionPlan)
    batch: BatchPlan = field(default_factory=BatchPlan)
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    activation: ActivationPlan = field(default_factory=ActivationPlan)
    offload: OffloadPlan = field(default_factory=OffloadPlan)
    loss: LossPlan = field(default_factory=LossPlan)
    attention: AttentionPlan = field(default_factory=AttentionPlan)
    adapter: AdapterPlan = field(default_factory=AdapterPlan)
    compile: CompilePlan = field(default_factory=CompilePlan)
    choice: ChoicePlan = field(default_factory=ChoicePlan)


PARTS: dict[str, type[Part]] = get_type_hints(PlanParts)
"""Map from section names to parts, in the order in which a Plan lists the parts."""

FIELDS: dict[str, dict[str, object]] = {
    section: {field.name: hints[field.name] for field in dataclasses.fields(part)}
    for section, part in PARTS.items()
    for hints in [get_type_hints(part)]  # this call is slow, so it runs once per part
}
"""Map from section names to field names, and from field names to annotated types."""

_OF_TRAINER = ("strategy", "accelerator", "devices", "num_nodes")
SETTINGS_OF_STRATEGY = [name for name in FIELDS["parallel"] if name not in _OF_TRAINER]
"""Fields that are settings in the argument ``strategy``. The other fields of the section are arguments themselves."""

AnyPlan = TypeVar("AnyPlan", bound=PlanParts)


def _fold(value: object, hint: object) -> object:
    """Return ``value`` as the plain Python type in ``hint``, or unchanged if ``value`` has a different type."""
    if isinstance(value, Mapping) and Mapping[str, object] == hint:
        return Options(value)
    return _plain(value, get_args(hint) or (hint,))


def _fold_option(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(map(_fold_option, value))
    return _plain(value, (int, float))


def _plain(value: object, wanted: tuple[object, ...]) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Integral) and int in wanted:
        return int(value)
    if isinstance(value, Real) and float in wanted:
        with suppress(OverflowError):  # an integer outside the range of float, which the Plan rejects
            return float(value)
    return value
