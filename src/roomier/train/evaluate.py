"""The evaluation loop of validate, test and predict."""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from roomier.api.hooks import step_of
from roomier.api.lightning_module import LightningAdapter
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.core.device.rng import preserved_rng, rng_state, set_rng_state
from roomier.core.errors import RoomierError, TrainingError, shorten
from roomier.core.tree import leaves, map_tensors, tensors
from roomier.core.world import World
from roomier.data.peers import compared
from roomier.data.source import Source
from roomier.data.turns import Turn
from roomier.engine.facts import OWNERS
from roomier.run.logged.muted import muted
from roomier.run.progress import WindowBatches
from roomier.run.run import Run, call
from roomier.run.states import RunningStage
from roomier.techniques.loss.lazy_logits import computed
from roomier.train.earlier_passes import passes_of
from roomier.train.step import transfer_of

LOADERS = {"validation": "val", "test": "test", "predict": "predict"}


class EvaluationCutError(Exception):
    """Exception that is raised if a signal interrupts an evaluation. The results of the evaluation are discarded."""


def evaluate(
    run: Run,
    stage: str,
    sources: Sequence[Source],
    limits: Sequence[float],
    *,
    keeps_predictions: bool = True,
    kept: list[list[Any]] | None = None,
) -> list[list[Any]]:
    """Process all batches of ``sources`` once in evaluation mode, without gradients.

    Args:
        stage: ``"validation"``, ``"test"`` or ``"predict"``.
        limits: maximum number of batches of each source, over all ranks.
        keeps_predictions: if True, return the outputs of ``"predict"``.
        kept: empty list that is filled and returned, so that hooks can read it.

    Returns:
        For ``"predict"``, a list for each source with the outputs of the step, one for each batch, in host memory. For
        other stages, the lists are empty. With several ranks, each rank receives the outputs of all ranks, in the
        order of the batches.

    Raises:
        EvaluationCutError: a signal interrupted the evaluation.
    """
    module, hooks, results = run.module, run.hooks, run.results
    outer_stage, results.stage, results.is_in_batch = results.stage, stage, False
    kept, rows = [] if kept is None else kept, StepRows(results.num_evaluated)
    run.engine.settle()
    take_statistics_of_rank_zero(run)
    epoch = run.progress.epoch
    # As in Lightning, the iterator of the first loader draws its seed before the hooks.
    opened = sources[0].turns(limits[0], epoch) if sources else iter(())
    try:
        with evaluation_mode(module, stage), without_gradients(run):
            call(getattr(hooks, f"on_{stage}_start"))
            call(getattr(hooks, f"on_{stage}_epoch_start"))
            for index, (source, limit) in enumerate(zip(sources, limits, strict=True)):
                results.dataloader_idx = index if len(sources) > 1 else None
                opened = source.turns(limit, epoch) if index else opened
                kept.append(_evaluate_source(run, stage, source, opened, rows, keeps_predictions))
            results.dataloader_idx, results.is_in_batch = None, False
            results.call(getattr(hooks, f"on_{stage}_epoch_end"))
            metrics = results.end_epoch(stage)
            if run.settled.request.state.stage is not RunningStage.SANITY_CHECKING:
                for index, row in rows.take():
                    run.log_evaluated_batch(row, index)
                run.log_metrics(metrics)
            call(getattr(hooks, f"on_{stage}_end"))
        run.vote(waits=True)  # callbacks processed the metrics and may have requested a stop
    except EvaluationCutError:
        results.abandon(stage)
        raise
    finally:
        results.stage, results.dataloader_idx, results.is_in_batch = outer_stage, None, False
        run.engine.settle()
    return kept


@torch.no_grad()
def take_statistics_of_rank_zero(run: Run) -> None:
    """Copy the floating-point buffers, such as the running statistics of BatchNorm, from rank 0 to all ranks. In a
    pipeline, copy those of a unit from the first rank of its stage.

    Each rank updates these statistics with its own batches. A checkpoint stores the buffers of rank 0. With the buffers
    of rank 0, all ranks evaluate the same model.
    """
    if run.ranks.is_alone:
        return
    network, ranks = run.engine.module, run.ranks
    own = {name: each for name, each in network.named_buffers() if each.is_floating_point()}
    owners, is_first, mesh = network.__dict__.get(OWNERS), ranks.data.is_zero, ranks.mesh

    def is_sent(name: str) -> bool:
        return owners is None or (is_first and owners.get(name, (mesh.stage - 1,))[0] == mesh.stage_index)

    sent = {name: each.cpu() for name, each in own.items() if is_sent(name)}
    values: Mapping[str, Tensor] = ranks.from_zero(sent) if owners is None else ChainMap(*ranks.gather(sent))
    for name, each in own.items():
        each.copy_(values[name])


def _evaluate_source(
    run: Run, stage: str, source: Source, opened: Iterator[Turn], rows: StepRows, keeps_predictions: bool
) -> list[Any]:
    dataloader_idx = run.results.dataloader_idx
    is_kept = stage == "predict" and keeps_predictions
    engine, run_batch = run.engine, batch_runner(run, stage, dataloader_idx)
    outer_transfer, engine.hooks.transfer = engine.hooks.transfer, transfer_of(run, dataloader_idx or 0)
    kept: dict[int, Any] = {}
    try:
        for batch_idx, turn in enumerate(turns(run, source, opened)):
            host_batch, run.now.batch_number, counts = turn
            if is_kept and counts:
                kept[run.now.batch_number] = on_host(run, run_batch(host_batch, batch_idx, counts))
            else:
                run_batch(host_batch, batch_idx, counts)
            if counts:
                rows.add(dataloader_idx or 0, run.results.step_values())
    finally:
        engine.hooks.transfer = outer_transfer
    if run.ranks.is_alone:
        return list(kept.values())
    return _of_all_ranks(run, kept) if keeps_predictions else []


def turns(run: Run, source: Source, opened: Iterator[Turn]) -> Iterator[Turn]:
    """Yield ``opened``, the turns of ``source``, and close the source at the end.

    Raises:
        EvaluationCutError: a signal stops the run.
    """
    if not run.ranks.peers.is_alone:
        opened = compared(run.ranks, opened, source, each=math.isinf(source.num_batches))
    try:
        for turn in opened:
            run.vote()
            if run.stop.received is not None:
                raise EvaluationCutError
            yield turn
    finally:
        source.close()  # otherwise, workers of a partly read loader would continue to run during training


def batch_runner(run: Run, stage: str, dataloader_idx: int | None) -> Callable[[Any, int, bool], Any]:
    """Return a function that runs the hooks and the step of one batch, and returns the output of the step.

    The arguments of the function are the batch, the index of the batch on this rank, and whether the batch is counted.
    A batch that is not counted runs only because other ranks require the forward pass of this rank. Its result is None.

    Args:
        dataloader_idx: index of the loader; None if the run has only one loader.
    """
    module, results, engine = run.module, run.results, run.engine
    passes_of(run)  # installs them in the engine, also without a fit
    starts = getattr(run.hooks, f"on_{stage}_batch_start")
    ends = getattr(run.hooks, f"on_{stage}_batch_end")
    own_step = step_of(module, f"{stage}_step", 2 if dataloader_idx is None else 3)
    last = () if dataloader_idx is None else (dataloader_idx,)

    def run_batch(host_batch: Any, batch_idx: int, counts: bool) -> Any:
        step = partial(_with_index, own_step, (batch_idx, *last))
        batch = results.batch = engine.move(host_batch)
        results.is_in_batch, engine.hooks.step_name = True, f"{stage}_step"
        try:
            if not counts:
                with muted(module.modules(), results):
                    engine.forward(step, batch)
                return None
            for hook in starts:
                hook(batch, batch_idx, *last)
            output = engine.forward(step, batch)
            if stage == "predict":
                output = computed(output)  # the output is used after the weights are changed or freed
            for hook in ends:
                hook(output, batch, batch_idx, *last)
            return output
        except Exception as error:
            note_text(error, host_batch, f"{LOADERS[stage]}_dataloaders")
            raise
        finally:
            results.batch = None

    return run_batch


def on_host(run: Run, output: Any) -> Any:
    """Return the output of a step with its tensors in host memory, so that outputs do not fill the device."""
    return output if run.engine.device.type == "cpu" else map_tensors(lambda tensor: tensor.cpu(), output)


def _of_all_ranks(run: Run, kept: dict[int, Any]) -> list[Any]:
    by_rank = run.ranks.data.gather(kept, allows_pickle=True)
    outputs = {number: output for of_rank in by_rank for number, output in of_rank.items()}
    if run.ranks.mesh.stage > 1:  # only the last stage computes outputs
        outputs = run.ranks.peers.from_zero(outputs, allows_pickle=True)
    return [outputs[number] for number in sorted(outputs)]


def _with_index(step: Callable[..., Any], rest: tuple[int, ...], batch: Any) -> Any:
    return step(batch, *rest)


def validate_within_fit(run: Run) -> None:
    """Run the validation that is due in a fit. If a signal interrupts the validation, the resumed run repeats it.

    See [Note: random states in validation].
    """
    progress = run.progress
    progress.is_validation_due = True
    if run.stop.received is not None:
        return
    run.module.on_validation_model_zero_grad()
    before = rng_state()
    with run.settled.request.state.within(RunningStage.VALIDATING):
        try:
            evaluate(run, "validation", run.batches.evaluated, run.batches.limits)
        except EvaluationCutError:
            set_rng_state(before)
            return
    if not isinstance(run.module, LightningAdapter):
        set_rng_state(before)
    progress.is_validation_due = False


def sanity_check(run: Run, num_batches: float) -> None:
    """Run a few validation batches before training, so that errors in validation are detected early."""
    with run.settled.request.state.within(RunningStage.SANITY_CHECKING), preserved_rng():
        call(run.hooks.on_sanity_check_start)
        evaluate(run, "validation", run.batches.evaluated, [min(limit, num_batches) for limit in run.batches.limits])
        call(run.hooks.on_sanity_check_end)
    run.results.forget_epochs()


@contextmanager
def evaluation_mode(module: Module, stage: str) -> Iterator[None]:
    """Set evaluation mode inside the context, and restore the mode of each submodule when the context ends. If the
    module overrides the hook that sets training mode, call this hook instead."""
    training = [each for each in module.modules() if each.training]
    getattr(module, f"on_{stage}_model_eval")()
    try:
        yield
    finally:
        if overrides(module, f"on_{stage}_model_train", Module):
            getattr(module, f"on_{stage}_model_train")()
        else:
            for each in training:
                each.training = True


@contextmanager
def without_gradients(run: Run) -> Iterator[None]:
    """Disable gradients inside the context. Inference mode is used if the options and the engine allow it."""
    inference = run.options.inference_mode and run.engine.allows_inference_mode
    with torch.inference_mode() if inference else torch.no_grad():
        yield


class StepRows:
    """Rows for the values that batches of one evaluation log with ``on_step=True``: one row per batch, as in Lightning.

    The rows are written at the end of the evaluation. Batches therefore do not wait for the device, and an evaluation
    that a signal interrupts writes no rows.

    Args:
        num_batches: for each loader, the number of batches of earlier evaluations. The step of a row is the number of
            its batch.
    """

    def __init__(self, num_batches: dict[str, int]) -> None:
        self._num_before = num_batches
        self._num_new: Counter[str] = Counter()
        self._rows: list[tuple[int, dict[str, Any]]] = []

    def add(self, loader: int, values: Mapping[str, Any]) -> None:
        """Add one batch of the loader with index ``loader``. ``values`` may be on the device, and may be empty."""
        name = str(loader)
        index = self._num_before.get(name, 0) + self._num_new[name]
        self._num_new[name] += 1
        if values:
            self._rows.append((index, {name: _small(value) for name, value in values.items()}))

    def take(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the rows at the end of the evaluation, and add its batches to ``num_batches``.

        Batches before the first row of the run are not counted, so a run without rows stores no numbers.
        """
        for name, number in self._num_new.items() if self._rows or self._num_before else ():
            self._num_before[name] = self._num_before.get(name, 0) + number
        return self._rows


def _small(value: Any) -> Any:
    """Return ``value``, or a copy if the tensor is a view that would retain a larger tensor."""
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.element_size():
        return value.clone()
    return value


def note_batches(error: Exception, window: WindowBatches, world: World) -> None:
    """Add a note to the ``error`` of a training step if there are several ranks or ``num_loss_terms`` failed. The note
    names the batches of the step and, with several ranks, the rank.

    :func:`note_text` can add another note about the first batch.
    """
    if world.size > 1 or (isinstance(error, TrainingError) and error.field == "num_loss_terms"):
        first, last = window.first_batch, window.first_batch + len(window.batches) - 1
        batches = f"batch {first}" if first == last else f"batches {first} to {last}"
        on_rank = f" on rank {world.rank}" if world.size > 1 else ""
        error.add_note(f"the step{on_rank} used {batches} of epoch {window.epoch}")
    note_text(error, window.batches[0], "train_dataloaders")


def note_text(error: Exception, batch: Any, name: str) -> None:
    """Add a note to ``error`` if ``batch`` contains text and no tensor, unless ``error`` is a RoomierError.

    Args:
        name: name of the user's argument that contains the loader, for the message.
    """
    is_text = any(isinstance(leaf, (str, bytes)) for leaf in leaves(batch)) and next(tensors(batch), None) is None
    if is_text and not isinstance(error, RoomierError):
        action = "Convert the text to tensors in the dataset or in collate_fn, with a tokenizer"
        error.add_note(f"{name}={shorten(batch)}: the batch contains text and no tensor. {action}")
