"""Workloads of ``roomier plan``: a class with arguments, roomier's GPT, or a Hugging Face configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor, nn

from roomier.api.adapt import as_module
from roomier.api.datamodule import DataModule
from roomier.api.module import Module, network_of
from roomier.api.overrides import overrides
from roomier.cli.optimizer_option import with_optimizer
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.tree import tensors
from roomier.data.combined import batches_of, training_loader
from roomier.models.gpt import GPT, GPTConfig
from roomier.planner.hugging_face import longest_of, read_config, workload_of_config
from roomier.planner.workload import Workload
from roomier.trainer.session import request_of

DEFAULT_BATCH = 8
_NUM_STEPS = 1000  # number of steps for schedules; the number does not affect the cost of a step
_INPUT = re.compile(r"\s*(?:(?P<name>\w+)\s*=)?\s*(?P<dtype>\w+)\s*\[(?P<sizes>[\d,\s]*)\]\s*")


@dataclass(frozen=True)
class Asked:
    """Workload that was requested on the command line.

    Attributes:
        name: name of the model.
        workload: the workload with the requested micro-batch.
        at_length: function that returns the workload with a different sequence length; None if the model has no
            sequences.
        length: sequence length in tokens.
        longest: maximum sequence length of the model; None if there is no limit.
    """

    name: str
    workload: Workload
    at_length: Callable[[int], Workload] | None = None
    length: int | None = None
    longest: int | None = None


def gpt_request(config: GPTConfig, batch_size: int | None, num_tokens: int | None) -> Asked:
    """Return the workload of roomier's GPT.

    Raises:
        RoomierError: the sequences are longer than the context of the model.
    """
    length = num_tokens or config.context
    if length > config.context:
        problem = f"must be at most {config.context}, the context of the model"
        raise RoomierError("seq_len", length, problem, "Shorten the sequences, or raise --model.context")
    with torch.device("meta"):
        module = as_module(GPT(config))

    def at_length(num_tokens: int) -> Workload:
        samples = batch_size or DEFAULT_BATCH
        batch = {name: _made(torch.long, (samples, num_tokens)) for name in ("input_ids", "targets")}
        return Workload(module, batch, samples)

    return Asked("GPT", at_length(length), at_length, length, config.context)


def hugging_face_request(path: str, batch_size: int | None, num_tokens: int | None) -> Asked:
    """Return the workload of the model that a ``config.json`` describes.

    Raises:
        RoomierError: the file cannot be read, or the kind of model is not supported.
    """
    try:
        config = read_config(path)
    except ImportError as error:
        raise RoomierError("hf", path, f"requires transformers: {error}", "Run `pip install transformers`") from error

    def at_length(num_tokens: int | None) -> Workload:
        return workload_of_config(config, batch_size or DEFAULT_BATCH, num_tokens)

    workload = at_length(num_tokens)
    ids = workload.batch.get("input_ids")
    name = type(workload.module.network).__name__
    if ids is None:
        return Asked(name, workload)
    return Asked(name, workload, at_length, ids.shape[1], longest_of(config))


def class_request(
    parser: ArgumentParser, config: Namespace, inputs: str | None, batch_size: int | None, stand_in: Any
) -> Asked:
    """Return the workload of a model class with its arguments, for a batch of its data or of given shapes.

    Args:
        config: all options, including ``model`` and ``data``.
        inputs: shapes of a batch (see :func:`batch_of`); None uses a batch of the data.
        stand_in: Trainer that the model and its data can access.

    Raises:
        RoomierError: there is no data for a batch, or the data cannot be read.
    """
    module = as_module(with_optimizer(config, _on_meta_if_it_can(parser, config)))
    data = None if config.get("data") is None else parser.instantiate(_only(config, "data")).data
    stand_in.begin_call(request_of(stand_in, "fit", module, {}, data))
    stand_in.estimate_steps = lambda: _NUM_STEPS
    module.__dict__["_trainer"] = stand_in
    workload = Workload.of(module, batch_of(inputs) if inputs is not None else _first_batch(module, data, stand_in))
    if batch_size is not None:
        workload = workload.with_batch_size(batch_size)
    return Asked(type(network_of(module)).__name__, workload)


def tokens_per_sample(workload: Workload) -> int | None:
    """Return the sequence length if the samples of the batch are integer sequences of shape ``[T]``; otherwise None."""
    found = [each for each in tensors(workload.batch) if each.dim() >= 1 and each.shape[0] == workload.batch_size]
    is_text = bool(found) and not any(each.is_floating_point() for each in found) and found[0].dim() == 2
    return found[0].shape[1] if is_text else None


def batch_of(inputs: str) -> Any:
    """Return a batch of tensors without values from a description of the tensors.

    ``"x=float32[8,3]; y=int64[8]"`` is converted to a dict. Without names, the result is a tuple or a single tensor.

    Raises:
        RoomierError: a description is invalid, or only some tensors have names.
    """
    made: list[tuple[str | None, Tensor]] = []
    for text in inputs.split(";"):
        found = _INPUT.fullmatch(text)
        dtype = getattr(torch, found["dtype"], None) if found else None
        sizes = tuple(int(each) for each in found["sizes"].split(",") if each.strip()) if found else ()
        if found is None or not isinstance(dtype, torch.dtype) or not sizes:
            action = "Use name=dtype[sizes] with samples first, such as 'x=float32[8,3,224,224]' or 'label=int64[8]'"
            raise RoomierError("input", text, "must be a name, a dtype and sizes", action)
        made.append((found["name"], _made(dtype, sizes)))
    names = [name for name, _ in made if name is not None]
    if names and (len(names) < len(made) or len(set(names)) < len(made)):
        raise RoomierError("input", inputs, "must have a unique name for each tensor, or no names", "Name all or none")
    if names:
        return {str(name): tensor for name, tensor in made}
    return made[0][1] if len(made) == 1 else tuple(tensor for _, tensor in made)


def _made(dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def _only(config: Namespace, name: str) -> Namespace:
    """Return a copy of ``config`` in which only ``name`` of the options ``model`` and ``data`` is set."""
    kept = config.clone()
    for other in ("model", "data"):
        if other != name:
            kept[other] = None
    return kept


def _on_meta_if_it_can(parser: ArgumentParser, config: Namespace) -> nn.Module:
    wanted = _only(config, "model")

    def make() -> nn.Module:
        model: nn.Module = parser.instantiate(wanted).model
        if isinstance(model, Module) and overrides(model, "configure_model", Module):
            model.configure_model()
        return model

    try:
        with torch.device("meta"):
            return make()
    except RoomierError:
        raise
    # A constructor can run any code. An error that the model causes occurs again without the meta device.
    except Exception as error:
        model = make()
        notice(
            "the model was created in memory, because the model cannot be created on the meta device "
            f"({type(error).__name__}: {error})"
        )
        return model


def _first_batch(module: Module, data: DataModule | None, stand_in: Any) -> Any:
    if data is not None:
        data.trainer = stand_in
        data.prepare_data()
        data.setup("fit")
    loader = module.train_dataloader() if data is None else data.train_dataloader()
    if loader is None:
        action = "Pass --data with a DataModule, or the shapes of a batch: --input 'x=float32[8,3,224,224]'"
        raise RoomierError("data", None, "is required, because the model has no training data", action)
    try:
        return next(batches_of(training_loader(loader, "train_dataloader")))
    except StopIteration:
        name = type(data or module).__name__
        raise RoomierError("data", name, "yields no batch", "Pass data with at least one sample") from None
