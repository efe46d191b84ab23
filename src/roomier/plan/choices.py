"""The values that fields of a Plan accept, their labels, and the values that are known but rejected.

To implement a rejected choice, move its entry from ``REFUSED`` to ``CHOICES`` (an optimizer to ``OPTIMIZERS``). No
other code in this folder needs to change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from numbers import Integral
from pkgutil import resolve_name
from typing import Any, TypeGuard

from roomier.core.extensions import load_extensions


class Kind(StrEnum):
    """Label that states how a choice changes the results, compared to the same run without the choice on the same
    ranks.

    An option that defines the training (optimizer, schedule, clipping, adapters) is compared with plain PyTorch code
    that uses the same option. Labels assume deterministic kernels.
    """

    EXACT = "exact"
    """Parameters, optimizer states and losses have the same bits."""
    NEAR = "near"
    """The mathematics is the same, but the rounding differs. Sums are split differently (across ranks, shards,
    micro-batches or chunks), different kernels run, or intermediate results have a different number format."""
    APPROXIMATE = "approximate"
    """The mathematics differs, for example because gradients are compressed, or because weights and optimizer states
    have fewer bits."""


@dataclass(frozen=True)
class Choice:
    """A supported choice, with its label and a remark for the table that is printed at the start of a run.

    Attributes:
        kind: the label. None if the choice selects a device, because labels do not compare devices, or if it is a part
            of another choice with a label.
        note: remark in the table.
    """

    kind: Kind | None
    note: str


@dataclass(frozen=True)
class ImportedChoice(Choice):
    """A choice whose code is imported when a run uses it.

    Attributes:
        made_by: import path of a class or function, as in ``"torch.optim:AdamW"``. For an optimizer, it is a class
            whose constructor has the argument ``weight_decay``. For an activation policy, it is a function that
            receives the number of blocks and returns for each block, in the order of the model, a ``Keep`` or a
            function that creates the context of a forward pass with gradients, such as
            ``torch.autograd.graph.saved_tensors_hooks``.
    """

    made_by: str

    def load(self) -> Any:
        """Import and return the class or function."""
        return resolve_name(self.made_by)


@dataclass(frozen=True)
class OptimizerChoice(ImportedChoice):
    """An optimizer that a name selects.

    Attributes:
        cuda_bytes: bytes that an update moves per float32 weight on an accelerator.
        cpu_bytes: time of an update per float32 weight on a CPU, in bytes that a fused AdamW moves in this time (28 for
            AdamW itself).
        num_operations: number of operations for each tensor; 0 for a fused optimizer, which performs one operation for
            all tensors.
        keeps_low_bits: True if the optimizer can store the low bits that bfloat16 weights lack.
        is_elementwise: for a class outside of torch and roomier, True if the update of a parameter depends only on this
            parameter, so that its states can be offloaded.
        sent_bytes: bytes per weight of a message, for an optimizer that averages over the ranks itself, so that each
            rank has the gradients of its own batches; 0 if the gradients are reduced before the update.
    """

    cuda_bytes: float
    cpu_bytes: float
    num_operations: float = 0.0
    keeps_low_bits: bool = False
    is_elementwise: bool = False
    sent_bytes: float = 0.0


@dataclass(frozen=True)
class CompressionChoice(ImportedChoice):
    """A compression of the gradients that ``"ddp"`` sends.

    ``made_by`` names a class such as :class:`roomier.techniques.parallel.powersgd.PowerSGD`. Its constructor receives
    the ``ParallelPlan``, ``register(ddp)`` registers a communication hook of DDP, and the static method
    ``sent_bytes(shape, itemsize, parallel)`` returns the bytes that are sent for the gradient of a parameter.

    Attributes:
        num_passes: number of passes over the gradients that the compression adds, with which the planner computes its
            time on a CPU.
        num_collectives: number of collectives for each bucket.
    """

    num_passes: float = 0.0
    num_collectives: int = 1


@dataclass(frozen=True)
class Refusal:
    """A known choice that is rejected.

    Attributes:
        instead: the alternative, as an imperative sentence.
        problem: why the choice is rejected.
    """

    instead: str
    problem: str = "is not implemented"


_exact, _near, _approximate = (partial(Choice, kind) for kind in (Kind.EXACT, Kind.NEAR, Kind.APPROXIMATE))


def _torch_optimizer(
    name: str, cuda_bytes: float, cpu_bytes: float, num_operations: float = 0.0, *, keeps_low_bits: bool = False
) -> OptimizerChoice:
    note, path = f"torch.optim.{name}", f"torch.optim:{name}"
    return OptimizerChoice(Kind.EXACT, note, path, cuda_bytes, cpu_bytes, num_operations, keeps_low_bits)


OPTIMIZERS: dict[str, OptimizerChoice] = {
    "adamw": _torch_optimizer("AdamW", 28, 28, keeps_low_bits=True),
    "adam": _torch_optimizer("Adam", 28, 28),
    "sgd": _torch_optimizer("SGD", 12, 14),
    "adafactor": _torch_optimizer("Adafactor", 68, 164, 16),
    "rmsprop": _torch_optimizer("RMSprop", 56, 57, 6),
    "adagrad": _torch_optimizer("Adagrad", 48, 57, 6),
    "nadam": _torch_optimizer("NAdam", 92, 111, 13),
    "radam": _torch_optimizer("RAdam", 116, 116, 14),
    "adamw8bit": OptimizerChoice(
        Kind.APPROXIMATE,
        "AdamW; states of large matrices in 8 bits, quantized in blocks",
        "roomier.techniques.optim.adamw:BlockwiseAdamW",
        *(16, 60, 11),  # read: weight, gradient and codes; written: weight and codes
        keeps_low_bits=True,
    ),
    "adamw4bit": OptimizerChoice(
        Kind.APPROXIMATE,
        "AdamW; states of large matrices in 4 bits, quantized in blocks",
        "roomier.techniques.optim.adamw:BlockwiseAdamW",
        *(14, 60, 11),
        keeps_low_bits=True,
    ),
    "lion": OptimizerChoice(
        Kind.EXACT,
        "Lion (Chen et al. 2023): the sign of the momentum",
        "roomier.techniques.optim.lion:Lion",
        *(44, 49, 20),
        keeps_low_bits=True,
    ),
    "muon": OptimizerChoice(
        Kind.EXACT,
        "torch.optim.Muon for hidden matrices, AdamW for the rest",
        "roomier.techniques.optim.muon:Muon",
        *(48, 48, 7),  # for hidden matrices, in addition to their products
    ),
    "onebit_adam": OptimizerChoice(
        Kind.APPROXIMATE,
        "Adam; sends signs of the momentum after the variance is frozen",
        "roomier.techniques.optim.onebit_adam:OneBitAdam",
        *(140, 140, 20),
        sent_bytes=0.15625,  # a bit, and a float32 for 128 elements (docs/design/communication.md)
    ),
}
"""The optimizers by name. The other layers derive from this table which optimizers exist, what they cost, and which of
them support bfloat16 weights. An extension can add entries (see ``roomier.core.extensions``)."""


def averages_itself(optimizer: str | None) -> TypeGuard[str]:
    """Return whether the optimizer with this name averages over the ranks itself, like 1-bit Adam, instead of receiving
    reduced gradients."""
    return optimizer in OPTIMIZERS and OPTIMIZERS[optimizer].sent_bytes > 0


COMPRESSIONS: dict[str, Choice] = {
    "none": _exact(""),
    "powersgd": CompressionChoice(
        Kind.APPROXIMATE,
        "low-rank gradients with error feedback, after a warm-up",
        "roomier.techniques.parallel.powersgd:PowerSGD",
        num_passes=6,  # add the error, two products, the sum of both, the new error
        num_collectives=3,  # one per factor, and one for the other gradients
    ),
}
"""Compressions of the gradients that ``"ddp"`` sends. An extension can add a :class:`CompressionChoice`."""

POLICIES: dict[str, Choice] = {
    "none": _exact("all activations are saved for backward"),
    "full": _exact("each block saves its input and is recomputed in backward"),
    "every_n": _exact("one block in every n saves only its input"),
    "selective": _exact("blocks save results of matmuls and attention; the rest is recomputed"),
    "budget": _exact("activations are recomputed or moved as the budget requires"),
}
"""Activations that blocks save for backward. An extension can add an :class:`ImportedChoice`."""

CHOICES: dict[str, Mapping[str, Choice]] = {
    "parallel.strategy": {
        "single": _exact("one process, nothing is sharded"),
        "ddp": _near("nothing is sharded; gradients are summed over replicas"),
        "zero1": _near("optimizer states and fp32 weights are sharded across ranks"),
        "zero2": _near("gradients are sharded across ranks too"),
        "zero3": _near("weights are sharded too; each block is all-gathered when it computes"),
        "hsdp": _near("zero3 within groups of ranks, each group with one replica"),
        "auto": _near("the fastest plan that fits, chosen when the run starts"),
    },
    "parallel.schedule": {
        "1f1b": Choice(None, "a rank alternates forward and backward passes of micro-batches"),
        "gpipe": Choice(None, "a rank runs all forward passes of a step before the backward passes"),
        "interleaved_1f1b": Choice(None, "like 1f1b, with several stages on each rank"),
    },
    "parallel.reduce_dtype": {
        "32": _exact("gradients are reduced in float32"),
        "bf16": _near("gradients are rounded to bfloat16 before they are sent"),
    },
    "parallel.gradient_compression": COMPRESSIONS,
    "parallel.communication": {
        "overlapped": _exact("transfers run while neighboring units compute"),
        "sequential": _exact("transfers complete before the computation continues; fewer buffers"),
    },
    "parallel.accelerator": {
        "auto": Choice(None, "the accelerator of this machine, otherwise the CPU"),
        "cpu": Choice(None, ""),
        "gpu": Choice(None, "the accelerator of this machine"),
        **dict.fromkeys(("cuda", "mps", "xpu", "npu", "tpu"), Choice(None, "")),
    },
    "precision.mode": {
        "32-true": _exact("weights, gradients and states in float32"),
        "bf16-mixed": _near("matmul inputs are rounded to bfloat16; weights and updates stay in float32"),
        "16-mixed": _near("matmul inputs are rounded to float16, the loss is scaled; weights in float32"),
        "bf16-true": _approximate("bfloat16 weights lose updates below 2^-9 of a weight"),
        "64-true": _near("weights, gradients and states in float64"),
    },
    "precision.matmul": {
        "highest": _exact("float32 matmuls and convolutions are computed in float32"),
        "high": _near("float32 matmuls may round their inputs to TF32 (10 bits)"),
        "medium": _near("float32 matmuls may round their inputs to bfloat16 (7 bits)"),
    },
    "batch.gradient_clip_algorithm": {
        "norm": _exact("by the norm over all parameters"),
        "value": _exact("each element of a gradient"),
    },
    "batch.seeding": {
        "stream": _exact("generators continue from one step to the next"),
        "events": _near("random numbers depend on (seed, step, data rank, micro-batch), not on earlier steps"),
    },
    "optimizer.name": OPTIMIZERS,
    "optimizer.schedule": {
        "constant": _exact("constant learning rate after warm-up"),
        "linear": _exact("the learning rate decreases linearly to the last step"),
        "cosine": _exact("the learning rate decreases along half a cosine to the last step"),
    },
    "optimizer.weight_rounding": {
        "split": _exact("bfloat16 weights with 16 additional bits, updated like float32 weights"),
        "stochastic": _approximate("updates are rounded to bfloat16 up or down at random, unbiased"),
        "nearest": _approximate("bfloat16 weights lose updates below 2^-9 of a weight"),
    },
    "optimizer.step_in_backward": {
        "none": _exact("after backward"),
        "exact": _exact("each parameter when its gradient is complete; clipping by norm runs two backward passes"),
        "stale_norm": _approximate("each parameter in backward, clipped by the norm of the previous step"),
    },
    "activation.policy": POLICIES,
    "offload.optimizer_states": {
        "none": _exact("everything stays on the device"),
        "cpu": _exact("optimizer states are in host memory between updates"),
        "disk": _exact("optimizer states are on disk between updates"),
    },
    "offload.parameters": {
        "none": _exact(""),
        "cpu": _exact("the parameters of a block are on the device while it computes"),
        "disk": _exact("the parameters of a block are read from disk when it computes"),
    },
    "offload.activations": {
        "none": _exact(""),
        "cpu": _exact("saved activations are in host memory until backward"),
        "disk": _exact("saved activations are on disk until backward"),
    },
    "offload.update": {
        "auto": _exact("roomier selects when blocks are updated"),
        "plain": _exact("blocks are updated in turn after backward"),
        "deferred": _exact("each block is updated before its next forward pass"),
        "speculative": _exact("blocks are updated in backward, and again if the norm is clipped"),
    },
    "attention.kernel": {
        "auto": _exact("torch selects"),
        "flash": _near("FlashAttention"),
        "efficient": _near("memory-efficient attention"),
        "cudnn": _near("cuDNN attention"),
        "math": _near("attention scores in memory"),
    },
    "adapter.frozen_base": {
        "as_is": _exact("frozen weights are unchanged"),
        "int8": _approximate("frozen weights in 8 bits, with one scale per block"),
        "nf4": _approximate("frozen weights in 4-bit NormalFloat (Dettmers et al. 2023)"),
    },
}

SWITCHES: dict[str, Choice] = {
    "parallel.find_unused_parameters": _near("steps may skip parameters; gradients are summed in different buckets"),
    "batch.accumulate_grad_batches": _near("the gradient of the full batch, summed over micro-batches"),
    "loss.chunked": _near("cross_entropy never holds all logits; the loss is summed over chunks"),
    "adapter.lora_rank": _exact(""),
    "compile.enabled": _near("fused kernels round differently; dropout uses different random numbers"),
    "choice.memory_budget_bytes": _exact("per device, at the peak of a step"),
}
"""Flags and numbers, each with the label and the remark that apply if it is set. An option that is not set has the
label exact."""

_OWN_OPTIMIZER = "Use optimizer='adamw', or return another optimizer from configure_optimizers"
_SMALL_STATES = "Use optimizer='adamw8bit', whose states take a quarter of the memory, or 'adafactor'"
_IN_BACKWARD = "with step_in_backward=True, which frees each gradient in backward"
_PAGED = "with offload={'optimizer_states': 'cpu'}, which stores the states in host memory"
_SCHEDULE_FREE = "Use optimizer='adamw' with lr_schedule='cosine', or return this optimizer from configure_optimizers"
_LOW_RANK = "Use lora={'rank': 8}, which trains low-rank weights, or optimizer='adamw8bit'"
_NOT_REGISTERED = "is not an accelerator of this installation of torch"
_IS_STRATEGY = "is a strategy"
_KNOWN_DEVICES = "Use accelerator='cuda', 'mps', 'xpu', 'npu', 'tpu' or 'cpu'"


REFUSED: dict[str, dict[str, Refusal]] = {
    "parallel.strategy": {
        "ddp_notebook": Refusal("Use strategy='ddp' in a script, because a notebook has one process"),
        "dp": Refusal("Use strategy='ddp'", problem="is not supported, because PyTorch advises against DataParallel"),
        "horovod": Refusal("Use strategy='ddp', and start the ranks with mpirun, torchrun or devices=N"),
        "xla_fsdp": Refusal("Use accelerator='tpu' and strategy='zero3'"),
        **dict.fromkeys(("xla", "tpu_spawn"), Refusal("Use accelerator='tpu' and strategy='ddp'")),
        **dict.fromkeys(("single_tpu", "single_xla"), Refusal("Use accelerator='tpu' and strategy='single'")),
        **dict.fromkeys(("model_parallel", "tensor_parallel", "context_parallel"), Refusal("Use strategy='zero3'")),
        "pipeline_parallel": Refusal(
            "Use strategy={'name': 'ddp', 'pipeline_parallel_size': 2}", problem="is not the name of a strategy"
        ),
    },
    "parallel.accelerator": {
        **dict.fromkeys(("hpu", "ipu"), Refusal(_KNOWN_DEVICES, problem=_NOT_REGISTERED)),
        **dict.fromkeys(("dp", "ddp", "ddp2", "ddp_spawn"), Refusal("Use strategy='ddp'", problem=_IS_STRATEGY)),
        "ddp_cpu": Refusal("Use strategy='ddp' and accelerator='cpu'", problem=_IS_STRATEGY),
        "ddp_sharded": Refusal("Use strategy='zero2'", problem=_IS_STRATEGY),
    },
    "precision.mode": {
        "16-true": Refusal(
            "Use precision='16-mixed', which keeps float32 weights, or 'bf16-true'",
            problem="cannot train, because float16 weights lose small updates and float16 gradients underflow",
        ),
        **dict.fromkeys(
            ("transformer-engine", "transformer-engine-float16", "fp8-mixed"), Refusal("Use precision='bf16-mixed'")
        ),
    },
    "optimizer.name": {
        **dict.fromkeys(("adamwfp8", "galore"), Refusal(_SMALL_STATES)),
        **dict.fromkeys(("lamb", "shampoo", "soap", "adamax", "adadelta", "asgd", "rprop"), Refusal(_OWN_OPTIMIZER)),
        **dict.fromkeys(("sparseadam", "ademamix", "grokadamw", "stable_adamw"), Refusal(_OWN_OPTIMIZER)),
        **dict.fromkeys(("ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"), Refusal(_OWN_OPTIMIZER)),
        **dict.fromkeys(("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"), Refusal(_SCHEDULE_FREE)),
        **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw"), Refusal(_LOW_RANK)),
        **{
            f"{kind}_layerwise": Refusal(f"{_LOW_RANK}, {_IN_BACKWARD}")
            for kind in ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw")
        },
        "adamw_anyprecision": Refusal(
            "Use optimizer='adamw' with precision='bf16-true', which does not lose small updates"
        ),
        "paged_adamw_32bit": Refusal(f"Use optimizer='adamw' {_PAGED}"),
        "paged_adamw_8bit": Refusal(f"Use optimizer='adamw8bit' {_PAGED}"),
        **dict.fromkeys(("paged_lion_32bit", "paged_lion_8bit"), Refusal(f"Use optimizer='lion' {_PAGED}")),
        "lion_8bit": Refusal("Use optimizer='lion', or 'adamw8bit', whose states have 8 bits"),
        "rmsprop_bnb": Refusal("Use optimizer='rmsprop'"),
        "rmsprop_bnb_8bit": Refusal("Use optimizer='rmsprop', or 'adamw8bit', whose states have 8 bits"),
        "lomo": Refusal(f"Use optimizer='sgd' {_IN_BACKWARD}"),
        "adalomo": Refusal(f"Use optimizer='adafactor' {_IN_BACKWARD}"),
        "lbfgs": Refusal(
            "Use optimizer='adamw', or manual optimization (automatic_optimization=False)",
            problem="computes the loss several times per step, which automatic optimization does not support",
        ),
    },
    "optimizer.schedule": dict.fromkeys(
        ("wsd", "step", "exponential", "polynomial", "inverse_sqrt", "one_cycle", "plateau"),
        Refusal("Use lr_schedule='cosine', or return another scheduler from configure_optimizers"),
    ),
    "attention.kernel": {"flex": Refusal("Use 'auto', or call torch.nn.attention.flex_attention in the model")},
    "adapter.frozen_base": {
        "fp4": Refusal("Use 'nf4', which has a smaller error at the same size"),
        "int4": Refusal("Use 'nf4'"),
    },
}

_SPELLINGS: dict[str, dict[str, str]] = {
    "parallel.strategy": {
        "single": "single_device",
        "ddp": "ddp_spawn ddp_fork ddp2 ddp_cpu no_shard",
        "zero1": "deepspeed_stage_1",
        "zero2": "sharded ddp_sharded ddp_sharded_spawn shard_grad_op deepspeed deepspeed_stage_2",
        "zero3": "fsdp fsdp2 fsdp_native ddp_fully_sharded full_shard fully_shard fully_sharded deepspeed_stage_3",
        "hsdp": "hybrid_shard",
    },
    "parallel.accelerator": {"tpu": "xla"},
    "parallel.reduce_dtype": {"32": "fp32 float32", "bf16": "bfloat16"},
    "parallel.gradient_compression": {"powersgd": "power_sgd"},
    "precision.mode": {
        "32-true": "32 fp32",
        "64-true": "64 fp64",
        "bf16-mixed": "bf16",
        "16-mixed": "16 fp16 fp16-mixed",
        "16-true": "fp16-true",
        "fp8-mixed": "fp8",
    },
    "precision.matmul": {"high": "tf32"},
    "optimizer.name": {
        "adamw": "adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused",
        "adamw8bit": "adamw_8bit adam8bit adamw_torch_8bit adamw_bnb_8bit",
        "adamw4bit": "adamw_4bit adamw_torch_4bit",
        "onebit_adam": "onebitadam 1bit_adam one_bit_adam",
        "lion": "lion_32bit",
        "rmsprop": "rmsprop_bnb_32bit",
    },
    "optimizer.schedule": {"one_cycle": "onecycle"},
    "optimizer.weight_rounding": {"split": "split_master"},
    **{f"offload.{name}": {"cpu": "host", "disk": "nvme"} for name in ("optimizer_states", "parameters")},
    "offload.activations": {"cpu": "host", "disk": "nvme"},
    "attention.kernel": {"flash": "flash_attention", "efficient": "mem_efficient efficient_attention"},
    "adapter.frozen_base": {"int8": "8bit", "nf4": "4bit"},
}
ALIASES = {
    field: {alias: word for word, aliases in words.items() for alias in aliases.split()}
    for field, words in _SPELLINGS.items()
}
"""Other spellings of a value, by field, each with the value."""

OFFLOADING_STRATEGIES: dict[str, tuple[str, dict[str, str]]] = {
    "deepspeed_stage_1_offload": ("zero1", {"optimizer_states": "cpu"}),
    "deepspeed_stage_2_offload": ("zero2", {"optimizer_states": "cpu"}),
    "deepspeed_stage_3_offload": ("zero3", {"optimizer_states": "cpu", "parameters": "cpu"}),
    "deepspeed_stage_3_offload_nvme": ("zero3", {"optimizer_states": "disk", "parameters": "disk"}),
    "fsdp_cpu_offload": ("zero3", {"optimizer_states": "cpu", "parameters": "cpu"}),
}
"""Names of Lightning strategies that include offloading, each with the strategy and the tiers of the Plan."""

STRATEGY_SUFFIXES = {"offload": "cpu", "disk": "disk"}
"""Map from the suffix of a strategy, as in ``"zero2+disk"``, to the tier of the optimizer states."""


def canonical(field: str, value: object) -> object:
    """Return the canonical spelling of a choice: ``"AdamW"`` becomes ``"adamw"``, and ``16`` becomes ``"16-mixed"``.

    A value that is unknown for ``field`` is returned unchanged. The rules reject it later.
    """
    if field not in CHOICES or isinstance(value, bool) or not isinstance(value, (str, Integral)):
        return value
    word = str.lower(value) if isinstance(value, str) else str(int(value))
    word = ALIASES.get(field, {}).get(word, word)
    if word not in CHOICES[field]:
        load_extensions()
    return word if word in CHOICES[field] or word in REFUSED.get(field, {}) else value


def aliases_of(field: str, value: str) -> list[str]:
    """Return the aliases of ``value``, in the order of ``ALIASES``."""
    return [alias for alias, word in ALIASES.get(field, {}).items() if word == value]


def compression_named(name: str) -> CompressionChoice | None:
    """Return the compression of gradients that ``name`` selects in a valid Plan; None for ``"none"``."""
    choice = COMPRESSIONS[name]
    return choice if isinstance(choice, CompressionChoice) else None


def choice_of(field: str, value: Any) -> Choice:
    """Return the label and the remark of a choice in a valid Plan."""
    if field in SWITCHES:
        return SWITCHES[field]
    # An accelerator can be the name of a device that a package added to torch.
    return CHOICES[field].get(value, Choice(None, "")) if field == "parallel.accelerator" else CHOICES[field][value]
