"""Table of all synchronizations, and the program that fails without each of them.

A row without a program contains a proof that no program can show a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import benchmarks
import roomier
from tests.device import mutant_measurements as measurements
from tests.device import mutant_programs as programs
from tests.device import mutant_reads as reads
from tests.device import mutant_updates as updates
from tests.device.mutant_scenario import Scenario
from tests.device.synchronizations import synchronizations
from tests.offload.training_on_device import train as train_offloaded
from tests.offload.training_on_device import train_shards

_TIMED = {"compares_waits": True}

PROGRAMS: dict[str, Scenario] = {
    "batches": Scenario(programs.batches_on_the_copy_stream),
    "offload": Scenario(programs.offloaded_blocks, compares_waits=True),
    "blocking offload": Scenario(programs.blocking_offload),
    "disk": Scenario(programs.blocks_on_disk, compares_waits=True),
    "background save": Scenario(programs.background_save, compares_waits=True),
    "update numbers": Scenario(programs.update_numbers, compares_waits=True),
    "fit": Scenario(programs.fit, compares_waits=True),
    "early stopping": Scenario(reads.state_of_early_stopping),
    "written predictions": Scenario(reads.written_predictions),
    "spike guard": Scenario(reads.figures_of_the_spike_guard),
    "averaged buffers": Scenario(reads.shared_buffers_of_averages),
    "evaluated buffers": Scenario(reads.shared_buffers_of_evaluation),
    "Strategy.reduce": Scenario(reads.reduced_by_the_strategy),
    "kept predictions": Scenario(reads.kept_predictions),
    "streamed predictions": Scenario(reads.streamed_predictions, num_ranks=2),
    "metric states": Scenario(reads.kept_metric_state),
    "bytes of a tensor": Scenario(reads.bytes_of_a_tensor),
    "message": Scenario(reads.message_to_ranks),
    "histogram": Scenario(reads.counted_histogram),
    "image": Scenario(reads.pixels_of_an_image),
    "pickled tensor": Scenario(reads.content_of_a_pickled_tensor),
    "metric for a notebook": Scenario(reads.metric_for_a_notebook),
    "random states": Scenario(reads.restored_random_state),
    "checked random states": Scenario(reads.checked_random_state),
    "exported factors": Scenario(reads.exported_adapter),
    "exported modules": Scenario(reads.exported_modules),
    "onnx": Scenario(reads.inputs_of_onnx),
    "planned values": Scenario(reads.known_values_of_planner),
    "copied values": Scenario(reads.known_values_of_copies),
    "compared outputs": Scenario(reads.compared_outputs),
    "speech": Scenario(reads.lengths_of_speech),
    "seconds": Scenario(measurements.measured_seconds, **_TIMED),
    "host copies": Scenario(measurements.measured_host_copies, **_TIMED),
    "collectives": Scenario(measurements.measured_collectives, num_ranks=2, **_TIMED),
    "offload times": Scenario(measurements.measured_offload, **_TIMED),
    "disk times": Scenario(measurements.measured_disk),
    "bandwidth": Scenario(measurements.measured_bandwidth, **_TIMED),
    "turn": Scenario(measurements.measured_turn, **_TIMED),
    "lever": Scenario(measurements.measured_lever, **_TIMED),
    "strategy": Scenario(measurements.measured_strategy, num_ranks=2, **_TIMED),
    "profile": Scenario(measurements.recorded_profile, **_TIMED),
    "throughput": Scenario(measurements.logged_throughput, **_TIMED),
    "step times": Scenario(measurements.measured_step_times, **_TIMED),
    "stragglers": Scenario(measurements.measured_stragglers, **_TIMED),
    "events": Scenario(measurements.measured_events, **_TIMED),
    "capabilities": Scenario(measurements.tried_capabilities),
    "vote": Scenario(programs.vote_on_the_host, num_ranks=2),
    "exchange": Scenario(programs.exchange_on_the_host, num_ranks=2),
    "pairwise": Scenario(programs.pairwise_on_the_host, num_ranks=2),
    "timed pairwise": Scenario(programs.timed_pairwise_on_the_host, num_ranks=2),
    "powersgd": Scenario(programs.powersgd_on_the_host, num_ranks=2),
    "sent stage": Scenario(programs.sent_to_the_next_stage, num_ranks=2),
    "parameters": Scenario(train_offloaded, {"kind": "cpu"}),
    "parameters on disk": Scenario(train_offloaded, {"kind": "disk"}),
    "states": Scenario(updates.offloaded_states),
    "states of shards": Scenario(updates.offloaded_states_of_shards, num_ranks=2),
    "shards": Scenario(train_shards, {"kind": "cpu", "updates_late": True}, num_ranks=2),
}

# The program that fails without each synchronization of roomier.
DETECTED: dict[str, str] = {
    "roomier.techniques.activation.disk_copies:DiskCopies._finished_ns | self.wait(self.mark())": "disk times",
    "roomier.techniques.activation.disk_copies:DiskCopies.wait | self._link.wait(mark.read.mark)": "disk",
    "roomier.techniques.activation.disk_copies:DiskCopies.wait_to_free | self._link.wait(mark.link)": "disk",
    "roomier.techniques.activation.copies:Copies._finished_ns | synchronize(self.device)": "offload times",
    "roomier.techniques.activation.copies:Copies.to_host | tensor.to('cpu', copy=True)": "blocking offload",
    "roomier.techniques.activation.copies:StreamCopies.to_host | "
    "torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)": "offload",
    "roomier.techniques.activation.copies:StreamCopies._copy | self._stream.wait_event(start)": "offload",
    "roomier.techniques.activation.copies:StreamCopies.mark | self._stream.record_event()": "offload",
    "roomier.techniques.activation.copies:StreamCopies.wait | "
    "computing_stream(self.device).wait_event(mark)": "offload",
    "roomier.techniques.activation.copies:Copies.wait_to_free | self.wait(mark)": "offload",
    "roomier.techniques.activation.copies:StreamCopies.start | computing_stream(self.device).record_event()": "offload",
    "roomier.techniques.activation.copies:Visit.arrive | copies.wait(self._mark)": "offload",
    "roomier.techniques.activation.copies:Visit.leave | copies.wait(self._mark)": "offload",
    "roomier.techniques.activation.profile:Recorder.stop | synchronize(self._device)": "profile",
    "benchmarks.gpu.copies:_row | torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pins)": "bandwidth",
    "benchmarks.gpu.copies:_copy_s | synchronize(device)": "bandwidth",
    "benchmarks.gpu.copies:_copy_s | synchronize(device) #2": "bandwidth",
    "benchmarks.gpu.mfu:_turn_s | synchronize(device)": "turn",
    "benchmarks.gpu.mfu:_turn_s | synchronize(device) #2": "turn",
    "benchmarks.lever_worker:Measurement._measure | synchronize(device)": "lever",
    "benchmarks.strategies:time_collectives | gather(*each, group).wait()": "timed pairwise",
    "benchmarks.strategies:_seconds | synchronize(device)": "collectives",
    "benchmarks.strategies:_seconds | synchronize(device) #2": "collectives",
    "benchmarks.seed.case:StepTimes.on_train_batch_end | synchronize(self._device)": "step times",
    "benchmarks.strategies:Strategy.time_turn | synchronize(self._device)": "strategy",
    "benchmarks.strategies:Strategy.time_turn | synchronize(self._device) #2": "strategy",
    "roomier.callbacks.early_stopping:EarlyStopping.load_state_dict | state_dict['best_score'].cpu()": "early stopping",
    "roomier.callbacks.prediction_writer:_save | tensor.detach().cpu()": "written predictions",
    "roomier.callbacks.spike_guard:SpikeGuard._read | torch.stack(figures).cpu()": "spike guard",
    "roomier.callbacks.straggler_monitor:StragglerMonitor.on_train_batch_end | synchronize(self._device)": "stragglers",
    "roomier.callbacks.throughput:Throughput._log | torch.accelerator.synchronize(device)": "throughput",
    "roomier.callbacks.weight_averaging:WeightAveraging._share_buffers | "
    "average.averages[name].cpu()": "averaged buffers",
    "roomier.checkpoint.background:BackgroundSaver._stage | synchronize(device)": "background save",
    "roomier.checkpoint.background:BackgroundSaver._buffer | "
    "torch.empty(shape, dtype=dtype, pin_memory=_copies_asynchronously(part))": "background save",
    "roomier.checkpoint.tensor_file:bytes_of | flat[begin:begin + CHUNK_BYTES].cpu()": "bytes of a tensor",
    "roomier.core.torch_offload:Gathers.wait_for | copying.wait_stream(stream)": "states of shards",
    "roomier.core.exchange:Exchange._swap | work.wait()": "exchange",
    "roomier.core.torch_offload:ShardGroup.before_unshard | "
    "stream.wait_stream(torch.accelerator.current_stream(group.device))": "shards",
    "roomier.run.run:Vote._arrived | work.wait()": "vote",
    "roomier.core.wire:_Encoder.node | value.detach().cpu()": "message",
    "roomier.data.choose:_process_changes | changes['pin_memory'] = True": "fit",
    "roomier.core.device.capability:_tried | torch.empty(1, pin_memory=True)": "capabilities",
    "roomier.core.device.rng:check_generator_state | state.cpu()": "checked random states",
    "roomier.core.device.rng:set_rng_state | state['torch'].cpu()": "random states",
    "roomier.core.device.rng:set_rng_state | own.cpu()": "random states",
    "roomier.core.device.streams:timed_event | event.record(computing_stream(device))": "events",
    "roomier.core.device.streams:synchronize | torch.accelerator.synchronize(device)": "seconds",
    "roomier.core.device.transfer:BatchMover.__call__ | copied.record_stream(computing)": "batches",
    "roomier.core.device.transfer:BatchMover.__call__ | computing.wait_stream(self._stream)": "batches",
    "roomier.engine.offloaded_updates:OffloadedUpdates._updating | "
    "self._stream.wait_stream(computing_stream(self._device))": "states",
    "roomier.engine.offloaded_updates:OffloadedUpdates._join | "
    "computing_stream(self._device).wait_stream(self._stream)": "states",
    "roomier.checkpoint.export.adapter:export_adapter | each.detach().cpu()": "exported modules",
    "roomier.checkpoint.export.adapter:_as_in_peft | b.detach().cpu()": "exported factors",
    "roomier.checkpoint.export.compared:_difference | own.detach().cpu()": "compared outputs",
    "roomier.checkpoint.export.compared:_difference | other.detach().cpu()": "compared outputs",
    "roomier.checkpoint.export.onnx:_session | each.detach().cpu()": "onnx",
    "roomier.planner.hardware.measure:host_copy_rate | torch.ones(num_bytes // 4, pin_memory=True)": "host copies",
    "roomier.planner.hardware.measure:seconds_of | synchronize(device)": "seconds",
    "roomier.planner.hardware.measure:seconds_of | synchronize(device) #2": "seconds",
    "benchmarks.models.deepspeech:DeepSpeech.forward | num_frames.cpu()": "speech",
    "benchmarks.models.deepspeech:DeepSpeech.forward | num_letters.cpu()": "speech",
    "roomier.techniques.offload.memory:DeviceMemory.free | self._owner.wait_event(self._copied)": "parameters",
    "roomier.techniques.offload.memory:DeviceMemory._copy | "
    "self._stream.wait_stream(computing_stream(self._device))": "parameters",
    "roomier.techniques.offload.memory:DeviceMemory._copy | self._stream.record_event()": "parameters",
    "roomier.techniques.offload.memory:DeviceMemory._wait | "
    "computing_stream(self._device).wait_event(self._copied)": "parameters",
    "roomier.techniques.offload.staging:DeviceStaging.bring | "
    "computing_stream(self._device).wait_event(found.arrived)": "states",
    "roomier.techniques.offload.staging:DeviceStaging._started | "
    "self._inward.wait_stream(computing_stream(self._device))": "states",
    "roomier.techniques.offload.staging:DeviceStaging._started | "
    "self._inward.wait_event(self._written[record])": "states",
    "roomier.techniques.offload.staging:DeviceStaging._started | self._inward.record_event()": "states",
    "roomier.techniques.offload.staging:DeviceStaging.send | "
    "self._outward.wait_stream(computing_stream(self._device))": "states",
    "roomier.techniques.offload.staging:DeviceStaging.send | self._outward.record_event()": "states",
    "roomier.techniques.offload.staging:DeviceStaging._drop | "
    "computing_stream(self._device).wait_event(present.arrived)": "states",
    "roomier.techniques.offload.staging:DeviceStaging.settle | done.synchronize()": "states",
    "roomier.techniques.offload.staging:DeviceStaging._free_leaving | "
    "computing_stream(self._device).wait_event(self._leaving[1])": "states",
    "roomier.techniques.optim.adamw:StepValues.numbers | found.pin_memory()": "update numbers",
    "roomier.techniques.parallel.collectives:wait_for | each.wait(PATIENCE)": "pairwise",
    "roomier.techniques.parallel.powersgd:PowerSGD._send | sent.wait()": "powersgd",
    "roomier.engine.staged:StagedEngine._wait_for_sends | sends.pop(0)[0].wait()": "sent stage",
    "roomier.planner.fake.shapes:_keep_value | tensor.detach().cpu()": "copied values",
    "roomier.planner.workload:_shape_of | tensor.detach().cpu()": "planned values",
    "roomier.techniques.tiers.buffers:allocate | "
    "torch.empty(num_bytes + extra_bytes, dtype=torch.uint8, pin_memory=True)": "disk",
    "roomier.techniques.tiers.scratch:Transfers._complete | job.wait()": "disk",
    "roomier.train.evaluate:take_statistics_of_rank_zero | each.cpu()": "evaluated buffers",
    "roomier.train.evaluate:on_host | tensor.cpu()": "streamed predictions",
    "roomier.train.saving.save:_kept_on_host | tensor.detach().to('cpu', copy=True)": "metric states",
    "roomier.trainer.lightning.views:PredictLoop.add | tensor.cpu()": "kept predictions",
    "roomier.trainer.lightning.views:Strategy.reduce | tensor.detach().cpu()": "Strategy.reduce",
    "roomier.launch.pickled:_Tensors.reduced | "
    "torch.empty(0, dtype=torch.uint8, device=value.device).set_(value).cpu()": "pickled tensor",
    "roomier.loggers.pixels:_pixels_of_one | tensor.expand(-1, -1, max(3, tensor.shape[-1])).cpu()": "image",
    "roomier.run.visuals:histograms | extent.cpu()": "histogram",
    "roomier.run.visuals:histograms | here.cpu()": "histogram",
    "roomier.trainer.in_notebook:_on_host | value.detach().cpu()": "metric for a notebook",
}

_TRIES_STREAMS = (
    "The function submits no work to the stream, so the wait orders no work. The call shows whether the device "
    "raises an error. Without the call, only a device that has streams without events would be treated differently."
)
EQUIVALENT: dict[str, str] = {
    "roomier.core.device.capability:_use_streams | "
    "event.record(torch.accelerator.current_stream(device))": _TRIES_STREAMS,
    "roomier.core.device.capability:_use_streams | stream.wait_event(event)": _TRIES_STREAMS,
    "benchmarks.models.deepspeech:DeepSpeech.forward | self.num_steps(num_frames).cpu()": "Packed sequences accept "
    "only lengths in host memory, so torch raises an error without the copy. The simulated accelerator copies them.",
    "roomier.checkpoint.export.adapter:_as_in_peft | "
    "a.detach().cpu()": "Both factors of a layer are on one device, and both "
    "copies run on its computing stream. The host waits for the second copy, which runs after the first copy.",
}

# Calls that have the name of a synchronization, but wait for processes or threads. These calls do not order any work of
# a device.
OF_THE_HOST = {
    "benchmarks.gpu.case:run_with_limit | process.wait(limit_s)",
    "benchmarks.gpu.case:_kill_session | process.wait()",
    "benchmarks.rank_processes:_wait | each.wait()",
    "benchmarks.upload:_forward | limit.wait(len(data))",
    "roomier.checkpoint.snapshots:copy_to_next_node | work.wait()",
    "roomier.checkpoint.background:BackgroundSaver.start | self.wait()",
    "roomier.checkpoint.background:BackgroundSaver.end | self.wait(_GRACE_S)",
    "roomier.callbacks.peer_snapshots:PeerSnapshots.on_train_batch_end | self._saver.wait()",
    "roomier.core.ranks:close_connections | work.wait(timedelta(milliseconds=1))",
    "roomier.core.ranks:wait_unless_lost | futures.wait([ended], _POLL_S)",
    "roomier.planner.hardware.measuring:_run_ranks | process.wait()",
    "roomier.launch.failure:FailureNews.watch_connecting | is_connected.wait(_END_S + 1.0)",
    "roomier.launch.failure:FailureNews.watch_connecting | is_connected.wait(_POLL_S)",
    "roomier.launch.failure:_end_in_time | is_ending.wait()",
    "roomier.launch.heartbeat:Heartbeat._exchange | self._stop.wait(self._tick_s)",
    "roomier.launch.heartbeat:Heartbeat._judge_zero | self._stop.wait(self._tick_s)",
    "roomier.launch.preemption:PreemptionThread._run | self._is_closed.wait(_PERIOD_S)",
    "roomier.launch.lighthouse:Lighthouse._beat | self._stop.wait(_BEAT_S)",
    "roomier.launch.survivors:KillWatch.continues_without_silent_ranks | self._stop.wait(_POLL_S)",
    "roomier.launch.survivors:KillWatch._watch | self._stop.wait(_POLL_S)",
    "roomier.launch.survivors:KillWatch._watch | self._stop.wait(_POLL_S) #2",
    "roomier.launch.survivors:KillWatch.survivors | self._is_lost.wait(PATIENCE_S)",
    "roomier.launch.watch:Children._kill | process.wait()",
    "roomier.launch.notebook:_StartedRanks.end | self._process.wait()",
    "roomier.run.signals:_ExitThread._run | self._is_closed.wait(TO_OBEY_S)",
    "roomier.sweeps:_RankZero._outcomes | store.wait(keys, limit)",
    "roomier.sweeps:_RankZero._receive | store.wait([key], _LIMIT if has_failed else _LIMIT_OF_SUCCESS)",
    "roomier.train.predict_stream:_after_roll_call | roll_call.wait()",
    "roomier.train.saving.save:settle_background_save | run.saves.background.wait()",
}


def of_roomier() -> Iterator[str]:
    """Yield the synchronizations of all modules of roomier and the benchmarks."""
    for folder in (Path(roomier.__file__).parent, Path(benchmarks.__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder.parent).with_suffix("").parts
            yield from synchronizations(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
