"""Conversion of Lightning's plugins and accelerators to arguments of the Trainer: precision, cluster environment,
checkpoint files, and synchronization of BatchNorm."""

from __future__ import annotations

import os
import signal
from typing import Any

from roomier.launch.job import REQUEUE
from roomier.plan.migrate.answers import Answers
from roomier.plan.migrate.objects import kind_of, setting_of

_DETECTED = "roomier detects the launcher from its environment variables"
_PRECISIONS = {
    "Precision": "32-true",
    "MixedPrecision": None,
    "HalfPrecision": None,
    "FSDPPrecision": None,
    "DeepSpeedPrecision": None,
    "XLAPrecision": None,
    "DoublePrecision": "64-true",
}
"""Mapping from each precision plugin to its precision; None if the object stores the precision."""

_ACCELERATORS = {"CPUAccelerator": "cpu", "CUDAAccelerator": "cuda", "MPSAccelerator": "mps", "XLAAccelerator": "tpu"}

_WITHOUT_EFFECT = {
    "LightningEnvironment": "roomier starts the ranks if no launcher has started them",
    "TorchElasticEnvironment": _DETECTED,
    "SLURMEnvironment": "roomier detects SLURM, and after SIGTERM or SIGUSR1 saves a checkpoint and requeues the job",
    "MPIEnvironment": _DETECTED,
    "TorchCheckpointIO": "checkpoints are folders, to which every rank writes; `roomier export` writes a single file",
}

_REQUEUE_SIGNALS = (None, signal.SIGTERM, getattr(signal, "SIGUSR1", None))

_REJECTED = {
    "KubeflowEnvironment": ("is not detected", "Start the pods with torchrun, whose variables roomier detects"),
    "LSFEnvironment": ("is not detected", "Start the ranks with torchrun or mpirun, whose variables roomier detects"),
    "XLAEnvironment": ("is not detected", "Start the ranks with torchrun, whose variables roomier detects"),
    "AsyncCheckpointIO": ("is not supported", "Use callbacks=[ModelCheckpoint(async_save=True)]"),
    "XLACheckpointIO": ("is not supported, because checkpoints are folders", "Remove it"),
    "TransformerEnginePrecision": ("is not implemented", "Use precision='bf16-mixed'"),
    "BitsandbytesPrecision": (
        "quantizes weights that are trained, so small updates are lost",
        "Use lora={'rank': 8, 'base': 'nf4'}, which trains adapters on quantized weights",
    ),
    "TorchSyncBatchNorm": (
        "is not applied to a model",
        "Convert the model: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    ),
}
"""Mapping from each unsupported plugin to the problem and the action."""

_BASES = {
    "CheckpointIO": (
        "is a custom CheckpointIO, which roomier does not call",
        "Remove it, and convert finished checkpoints with `roomier export`, or copy them in on_save_checkpoint",
    ),
    "ClusterEnvironment": (
        "is a custom ClusterEnvironment, which roomier does not call",
        "Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does",
    ),
    "Precision": ("is a custom precision plugin", "Use precision='bf16-mixed', or cast in forward of the module"),
    "LayerSync": ("is a custom LayerSync", "Convert the layers of the model before fit"),
}


def answer_plugin(answers: Answers, setting: str, plugin: object) -> None:
    """Record the answer to one plugin."""
    name = type(plugin).__name__
    bases = {each.__name__ for each in type(plugin).__mro__[1:]}
    if name in _REJECTED:
        answers.reject(setting, name, *_REJECTED[name])
    elif name == "SLURMEnvironment" and setting_of(plugin, "auto_requeue") is False and os.environ.get(REQUEUE) != "0":
        action = f"Set the environment variable {REQUEUE}=0 in the job script, or submit the job with --no-requeue and "
        answers.reject(
            f"{setting}.auto_requeue", False, "is a setting of the job", f"{action}remove auto_requeue=False"
        )
    elif name == "SLURMEnvironment" and setting_of(plugin, "requeue_signal") not in _REQUEUE_SIGNALS:
        found = setting_of(plugin, "requeue_signal")
        answers.reject(f"{setting}.requeue_signal", found, "does not end a run", "Use --signal=TERM@120 or USR1@120")
    elif name in _WITHOUT_EFFECT:
        answers.ignore(setting, name, _WITHOUT_EFFECT[name])
    elif name in _PRECISIONS:
        _answer_precision(answers, setting, plugin)
    else:
        base = next((each for each in _BASES if each in bases), None)
        unknown = (
            "is not a plugin that roomier supports",
            "Use the argument that replaces the plugin, such as precision",
        )
        answers.reject(setting, plugin, *(unknown if base is None else _BASES[base]))


def _answer_precision(answers: Answers, setting: str, plugin: object) -> None:
    name = type(plugin).__name__
    mode = _PRECISIONS[name] or getattr(plugin, "precision", "32-true")
    answers.use(setting, name, "precision", mode)
    scaler = setting_of(plugin, "scaler")
    if scaler is not None and getattr(scaler, "get_scale", lambda: _FIRST_SCALE)() not in (_FIRST_SCALE, 1.0):
        reason = "roomier creates the scaler, whose scale does not change the gradient of a step that is not skipped"
        answers.ignore(f"{setting}.scaler", type(scaler).__name__, reason)


_FIRST_SCALE = 65536.0


def answer_accelerator(answers: Answers, accelerator: object) -> None:
    """Record the answer to an accelerator object."""
    kind = kind_of(accelerator, _ACCELERATORS, "accelerator")
    if kind is None:
        action = "Use accelerator='cpu', 'cuda', 'mps', 'xpu', 'npu' or 'tpu'"
        answers.reject("accelerator", accelerator, "is not an accelerator that torch supports", action)
    else:
        answers.use("accelerator", kind, "accelerator", _ACCELERATORS[kind])


def plugins_of(given: Any) -> list[Any]:
    """Return the plugins in the ``plugins`` argument as a list."""
    return list(given) if isinstance(given, (list, tuple)) else [given]
