"""Export of a checkpoint as the folder of a Hugging Face model, for ``from_pretrained``."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from roomier.checkpoint.commit import committed_folder
from roomier.checkpoint.export.adapter import export_adapter_of
from roomier.checkpoint.export.merged import MergedTensors
from roomier.checkpoint.export.safetensors import (
    DEFAULT_SHARD_BYTES,
    Exported,
    ToWrite,
    dtype_in_file,
    names_in_files,
    new_folder,
    write_json,
    write_tensors,
)
from roomier.checkpoint.run_state import peek_run
from roomier.core.errors import CheckpointError, RoomierError
from roomier.core.hugging_face import Conversion, conversions_to_files, data_of_config
from roomier.core.log import notice
from roomier.plan.parts import AdapterPlan

PROCESSOR_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("*preprocessor_config.json", "processor_config.json", "chat_template*", "normalizer.json", "tekken.json"),
)
"""File name patterns of tokenizers and processors."""


def export_hugging_face(
    path: str | Path,
    output: str | Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    dtype: str | None = None,
    processor: Any = None,
    adapters: str = "merged",
) -> Exported:
    """Write the Hugging Face model in the checkpoint ``path`` to the folder ``output``, atomically.

    The folder contains the files that ``save_pretrained`` writes: ``config.json``, ``generation_config.json`` for
    generative models, and the weights. The weights have the same names as on the Hugging Face Hub. (In
    ``roomier.checkpoint.export.safetensors``, they have the names of the model in memory.) Tensors are read, converted
    and written one after another, so the export supports models of any size and checkpoints from any number of ranks.
    If the model fuses several tensors of the files into one, one such group of tensors is in memory at a time.

    Args:
        path: checkpoint folder.
        output: new folder.
        max_shard_bytes: maximum size of the tensors in one file, unless a single tensor is larger.
        dtype: dtype of all floating-point tensors: ``"fp32"``, ``"bf16"`` or ``"fp16"``; None preserves their dtypes.
        processor: folder whose tokenizer or processor files are copied, or an object with ``save_pretrained``.
        adapters: contents of the export of a model trained with ``lora``. ``"merged"`` adds the adapters to the
            weights. ``"alone"`` writes only the adapters, as a folder for the ``peft`` package.

    Raises:
        RoomierError: the checkpoint contains no Hugging Face model, transformers is not installed, an argument is
            invalid, or ``output`` is a file or a nonempty folder.
        CheckpointError: the checkpoint is damaged, or the disk is full.
    """
    if adapters not in ("merged", "alone"):
        raise RoomierError("adapters", adapters, "is unknown", "Use 'merged' or 'alone'")
    target = new_folder(output, dtype)
    described = peek_run(path)
    found = described.get("pretrained")
    if not found:
        problem = "contains no Hugging Face model"
        action = "Use `roomier export --to safetensors` for the weights of other models"
        raise RoomierError("checkpoint", str(path), problem, action)
    processor_files = _processor_files(processor)
    adapter = AdapterPlan(**described.get("plan", {}).get("adapter", {}))
    if adapters == "alone":
        num_bytes = export_adapter_of(path, target, adapter, prefix=found["prefix"], dtype=dtype)
        return Exported(target, ("adapter_model.safetensors",), num_bytes)
    stored = MergedTensors(path, "module", adapter)
    tensors = _tensors(stored, found, dtype)
    num_bytes = sum(each.num_bytes for each in tensors)
    with committed_folder(target, num_bytes) as folder:
        files = write_tensors(folder, tensors, max_shard_bytes)
        write_json(folder / "config.json", {**found["config"], "dtype": _main_dtype(tensors)})
        if found.get("generation_config"):
            write_json(folder / "generation_config.json", found["generation_config"])
        for file in processor_files:
            shutil.copy2(file, folder / file.name)
        if processor is not None and not processor_files:
            processor.save_pretrained(folder)
    return Exported(target, files, num_bytes)


def _tensors(stored: MergedTensors, found: Mapping[str, Any], dtype: str | None) -> list[ToWrite]:
    keys = {name: key for key, name in names_in_files(stored, found["prefix"]).items()}
    shapes = {name: tuple(stored.specs[key].shape) for name, key in keys.items()}
    model = _without_memory(found["config"])
    if model is None:
        conversions = [Conversion((name,), {name: shape}, None) for name, shape in shapes.items()]
    else:
        conversions = conversions_to_files(model, shapes)
    return [
        ToWrite(name, dtype_in_file(stored.specs[keys[group.conversion.sources[0]]].dtype, dtype), shape, reader)
        for group in (_ConvertedTensors(stored, keys, each) for each in conversions)
        for name, shape, reader in group.tensors()
    ]


@dataclass
class _ConvertedTensors:
    """Tensors that one conversion creates for the files. The tensors remain in memory from the first read to the last
    read."""

    stored: MergedTensors
    keys: Mapping[str, str]
    conversion: Conversion
    _made: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], Any]]:
        for name, shape in self.conversion.targets.items():
            yield name, shape, lambda name=name: self._read(name)

    def _read(self, name: str) -> Iterator[Tensor]:
        run, sources = self.conversion.run, self.conversion.sources
        if run is None:
            yield from self.stored.chunks(self.keys[sources[0]])
            return
        if name not in self._made:
            self._made = run({source: self.stored.whole(self.keys[source]) for source in sources})
        yield self._made.pop(name)


def _without_memory(config: Mapping[str, Any]) -> Any:
    """Return the model of ``config`` on the meta device, to determine the names of its weights in files.

    Returns None if transformers does not have the class of the model.
    """
    try:
        import transformers
    except ImportError:
        action = "pip install transformers, or use `roomier export --to safetensors`"
        raise RoomierError("to", "hugging-face", "requires transformers, which is not installed", action) from None
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        notice(f"transformers has no model class {named}, so the weights are written with their names in memory")
        return None
    try:
        with torch.device("meta"):
            return kind(cast(Any, kind).config_class.from_dict(data_of_config(config)))
    except Exception as error:  # the code of the model can raise any error for an invalid configuration
        problem = f"is not a valid config of {name} ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise CheckpointError("pretrained.config", config, problem, "Use `roomier export --to safetensors`") from error


def _main_dtype(tensors: list[ToWrite]) -> str:
    """Return the dtype of most floating-point elements. ``from_pretrained`` creates the model in this dtype."""
    num_elements: dict[torch.dtype, int] = {}
    for each in tensors:
        if each.dtype.is_floating_point:
            num_elements[each.dtype] = num_elements.get(each.dtype, 0) + torch.Size(each.shape).numel()
    return str(max(num_elements, key=lambda dtype: num_elements[dtype], default=torch.float32)).removeprefix("torch.")


def _processor_files(processor: Any) -> list[Path]:
    if processor is None or callable(getattr(processor, "save_pretrained", None)):
        return []
    if not isinstance(processor, (str, Path)) or not Path(processor).is_dir():
        action = "Pass the folder of a tokenizer or processor, or the object itself"
        raise RoomierError("processor", processor, "must be a folder or have a method save_pretrained", action)
    files = [each for each in sorted(Path(processor).iterdir()) if each.is_file() and _belongs(each.name)]
    if not files:
        action = "Pass the folder that its save_pretrained wrote"
        raise RoomierError("processor", str(processor), "contains no file of a tokenizer or processor", action)
    return files


def _belongs(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in PROCESSOR_FILES)
