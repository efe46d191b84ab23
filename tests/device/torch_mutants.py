"""Synchronizations of torch 2.13 that roomier's strategies use: FSDP2, DDP, and the collectives that roomier calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import roomier
from tests.device import mutant_programs as programs
from tests.device.mutant_scenario import Scenario
from tests.device.synchronizations import synchronizations

VERSION = "2.13"  # the names of the functions depend on this version

_FSDP = "torch.distributed.fsdp._fully_shard."
_COLLECTIVES = _FSDP + "_fsdp_collectives:"
_GROUP = _FSDP + "_fsdp_param_group:FSDPParamGroup."
_STATE = _FSDP + "_fsdp_state:FSDPState."
_PARAM = _FSDP + "_fsdp_param:FSDPParam."
_DDP = "torch.nn.parallel.distributed:DistributedDataParallel."
_INPUTS = "torch.distributed.utils:_recursive_to | "
_FUNCTIONAL = "torch.distributed._functional_collectives:"
_C10D = "torch.distributed.distributed_c10d:"
MODULES = (
    *(
        _FSDP + each
        for each in ("_fsdp_collectives", "_fsdp_param", "_fsdp_param_group", "_fsdp_state", "_fully_shard")
    ),
    "torch.nn.parallel.distributed",
    "torch.distributed.utils",
    "torch.distributed._functional_collectives",
    "torch.distributed.distributed_c10d",
)

_HSDP = {"name": "hsdp", "shard_size": 2}
PROGRAMS: dict[str, Scenario] = {
    "zero3": Scenario(
        programs.train,
        {"strategy": "zero3", "devices": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "num_steps": 2},
        num_ranks=2,
    ),
    "unshard": Scenario(programs.unsharded_unit, num_ranks=2),
    "hsdp": Scenario(
        programs.train, {"strategy": _HSDP, "devices": 4, "precision": "bf16-mixed", "num_steps": 2}, num_ranks=4
    ),
    "functional": Scenario(programs.functional_collective, num_ranks=2),
    **{
        name: Scenario(programs.collective, {"name": name}, num_ranks=2)
        for name in (
            "broadcast",
            "all_reduce",
            "all_gather",
            "all_gather_single",
            "reduce_scatter_single",
            "all_to_all_single",
            "recv",
        )
    },
}
# Programs that do not call the synchronizations in ``UNUSED``.
USES: dict[str, Scenario] = {
    **{name: PROGRAMS[name] for name in ("zero3", "hsdp")},
    "ddp": Scenario(programs.train, {"strategy": "ddp", "devices": 2}, num_ranks=2),
    "zero1": Scenario(
        programs.train, {"strategy": "zero1", "devices": 2, "accumulate_grad_batches": 2, "num_steps": 2}, num_ranks=2
    ),
    "zero2": Scenario(
        programs.train,
        {"strategy": "zero2", "devices": 2, "precision": "bf16-mixed", "activation_checkpointing": "full"},
        num_ranks=2,
    ),
    "a block twice": Scenario(programs.train, {"strategy": "zero3", "devices": 2, "order": (0, 1, 0, 2)}, num_ranks=2),
    "hsdp and a block twice": Scenario(
        programs.train, {"strategy": _HSDP, "devices": 4, "order": (0, 1, 0, 2), "num_steps": 2}, num_ranks=4
    ),
    "a norm that is not called": Scenario(
        programs.train,
        {"strategy": "zero3", "devices": 2, "precision": "bf16-mixed", "skips": True},
        num_ranks=2,
    ),
    "a detached block": Scenario(programs.train, {"strategy": "zero3", "devices": 2, "detached_after": 1}, num_ranks=2),
}

DETECTED: dict[str, str] = {
    _COLLECTIVES + "foreach_all_gather | all_gather_stream.wait_stream(all_gather_copy_in_stream)": "zero3",
    _COLLECTIVES + "foreach_all_gather | all_gather_stream.record_event()": "zero3",
    _COLLECTIVES + "foreach_all_gather_copy_out | device_handle.current_stream().wait_event(all_gather_event)": "zero3",
    _COLLECTIVES + "foreach_reduce | reduce_scatter_stream.wait_stream(current_stream)": "zero3",
    _COLLECTIVES + "foreach_reduce | reduce_scatter_stream.record_event()": "zero3",
    _COLLECTIVES + "foreach_reduce | post_reduce_stream.record_event() #3": "zero3",
    _COLLECTIVES + "foreach_reduce | all_reduce_stream.wait_stream(reduce_scatter_stream)": "hsdp",
    _GROUP + "wait_for_unshard | all_gather_copy_out_event.record()": "zero3",
    _GROUP + "_wait_all_gather_streams_on_event | self.comm_ctx.all_gather_copy_in_stream.wait_event(event)": "zero3",
    _GROUP + "post_backward | self.device_handle.current_stream().wait_event(oldest.event)": "zero3",
    _GROUP + "finalize_backward | self.device_handle.current_stream().wait_event(event)": "zero3",
    _STATE + "_root_pre_forward | self._comm_ctx.all_gather_copy_in_stream.wait_stream(current_stream)": "zero3",
    _STATE + "_post_forward | self._comm_ctx.all_gather_copy_in_stream.wait_event(all_gather_state.event)": "zero3",
    _FSDP + "_fully_shard:FSDPModule.unshard | handle.wait()": "unshard",
    _FUNCTIONAL + "wait_tensor | torch.ops._c10d_functional.wait_tensor(tensor)": "functional",
    _FUNCTIONAL + "AsyncCollectiveTensor.wait | wait_tensor(self.elem)": "functional",
    _C10D + "broadcast | work.wait()": "broadcast",
    _C10D + "all_reduce | work.wait()": "all_reduce",
    _C10D + "all_gather | work.wait()": "all_gather",
    _C10D + "all_gather_single | work.wait()": "all_gather_single",
    _C10D + "reduce_scatter_single | work.wait()": "reduce_scatter_single",
    _C10D + "all_to_all_single | work.wait()": "all_to_all_single",
    _C10D + "recv | work.wait()": "recv",
}

_AFTER_COPY_IN = (
    "Only foreach_all_gather submits work to the all-gather stream. Before each all-gather, this stream waits for "
    "the copy-in stream. The copy-in stream has waited for the same work in the statement before. All memory of an "
    "all-gather is allocated on the copy-in stream, so the all-gather stream reuses no memory."
)
_AFTER_POST_REDUCE = (
    "_wait_for_post_backward waits for the post-reduce event of the same reduction, which is recorded on the same "
    "stream after the all-reduce event. Both fields are set by one reduction and cleared together."
)
EQUIVALENT: dict[str, str] = {
    _GROUP + "_wait_all_gather_streams_on_event | self.comm_ctx.all_gather_stream.wait_event(event)": _AFTER_COPY_IN,
    _STATE + "_root_pre_forward | self._comm_ctx.all_gather_stream.wait_stream(current_stream)": _AFTER_COPY_IN,
    _STATE + "_post_forward | self._comm_ctx.all_gather_stream.wait_event(all_gather_state.event)": _AFTER_COPY_IN,
    _STATE + "_root_post_backward_final_callback | self._device_handle.current_stream().wait_event(rs_state.event)": (
        "In the same callback, finalize_backward has waited for the last post-reduce event of each stream. The event "
        "of a reduce-scatter precedes a post-reduce event on the same stream, or on the all-reduce stream, which has "
        "waited for the reduce-scatter."
    ),
    _COLLECTIVES + "foreach_reduce | all_reduce_stream.record_event()": _AFTER_POST_REDUCE,
    _GROUP + "_wait_for_post_backward | self.device_handle.current_stream().wait_event(self._all_reduce_state.event)": (
        _AFTER_POST_REDUCE
    ),
    _GROUP + "finalize_backward | torch.accelerator.current_stream().wait_event(event)": (
        "The all-gather was prefetched for a unit whose backward did not run. The unit that prefetched it, or a unit "
        "before that unit, reduces its gradients later in the same backward, because backward ends at trained "
        "parameters. Both collectives have one communicator, which runs them in order, and finalize_backward has "
        "waited for the reduction. zero1, which can skip a reduction, keeps its units unsharded and prefetches no unit."
    ),
}

_NO_OFFLOAD = "roomier does not use the CPUOffloadPolicy of FSDP2."
_NO_HOOK = "roomier registers no all-reduce hook."
_NO_RESET = "roomier does not call reset_iter_state. A step that failed ends the run."
_NO_ASYNC = "roomier does not call unshard(async_op=True)."
_NO_MESH = "roomier does not pass a size as reshard_after_forward."
_NO_OPTIM_EVENT = "roomier does not call set_post_optim_event."
_NO_TENSOR_PARALLEL = "roomier does not combine FSDP2 with tensor parallelism."
_ONE_REDUCTION = (
    "finalize_backward clears the event after each backward, because roomier does not call set_is_last_backward. In "
    "one backward, a group is reduced once, because autograd adds up all gradients of a parameter first."
)
_WHOLE_STEP = "The root of roomier contains the complete step, and completes groups of which only some modules ran."
_NO_DDP_PRECISION = "roomier does not use the mixed precision of DDP."
_NO_JOIN = "roomier does not use the Join context manager. All ranks have the same number of batches."
_MOVED = "Batches are on the device before DDP or FSDP2 receives them."
_NOT_FUNCTIONAL = "roomier and DTensor do not call this function in the supported strategies."
UNUSED: dict[str, str] = {
    _COLLECTIVES + "foreach_all_gather_copy_out | all_gather_work.wait()": _NO_ASYNC,
    _COLLECTIVES + "foreach_reduce | post_reduce_stream.record_event()": "roomier does not skip the all-reduce alone.",
    _COLLECTIVES + "foreach_reduce | all_reduce_stream.wait_stream(current_stream)": "No world has less than one rank.",
    _COLLECTIVES + "foreach_reduce | all_reduce_stream.wait_stream(reduce_scatter_stream) #2": _NO_HOOK,
    _COLLECTIVES + "foreach_reduce | new_sharded_grad.to(torch.device('cpu'), non_blocking=non_blocking)": _NO_OFFLOAD,
    _COLLECTIVES + "foreach_reduce | post_reduce_stream.record_event() #2": _NO_OFFLOAD,
    _PARAM + "_init_sharded_param | padded_sharded_param.cpu()": _NO_OFFLOAD,
    _PARAM + "_init_sharded_param | padded_sharded_param.pin_memory()": _NO_OFFLOAD,
    _PARAM + "_get_grad_inner_tensor | grad.wait()": _NO_TENSOR_PARALLEL,
    _PARAM + "reset_sharded_param | local_tensor.cpu()": _NO_OFFLOAD,
    _PARAM + "reset_sharded_param | local_tensor.cpu().pin_memory()": _NO_OFFLOAD,
    _GROUP + "unshard | self.device_handle.Event().record()": "A single rank is not sharded.",
    _GROUP + "reshard | self._reshard_after_forward_event.record()": _NO_MESH,
    _GROUP + "_reset_iter_state | current_stream.wait_event(event)": _NO_RESET,
    _GROUP + "_reset_iter_state | work.wait()": _NO_RESET,
    _GROUP + "_reset_iter_state | current_stream.wait_event(self._post_reduce_event)": _NO_RESET,
    _GROUP + "_reset_iter_state | current_stream.wait_event(self._all_reduce_state.event)": _NO_RESET,
    _STATE + "_reset_iter_state | current_stream.wait_event(ag_state.event)": _NO_RESET,
    _STATE + "_reset_iter_state | current_stream.wait_event(rs_state.event)": _NO_RESET,
    _STATE + "_reset_iter_state | current_stream.wait_event(event)": _NO_RESET,
    _GROUP + "_wait_for_post_backward | self.device_handle.current_stream().wait_event(self._post_reduce_event)": (
        _ONE_REDUCTION
    ),
    _GROUP + "post_backward | self.device_handle.current_stream().wait_event(self._post_reduce_event)": _WHOLE_STEP,
    _GROUP + "finalize_backward | fsdp_param.grad_offload_event.synchronize()": _NO_OFFLOAD,
    _GROUP + "finalize_backward | work.wait()": _NO_ASYNC,
    _STATE + "_root_pre_forward | self._comm_ctx.all_gather_copy_in_stream.wait_event(event)": _NO_OPTIM_EVENT,
    _STATE + "_root_pre_forward | self._comm_ctx.all_gather_stream.wait_event(event)": _NO_OPTIM_EVENT,
    _DDP + "_root_copy_hook | copy_event.record()": _NO_DDP_PRECISION,
    _DDP + "_module_wait_for_copy_hook | event.wait(stream=torch.accelerator.current_stream())": _NO_DDP_PRECISION,
    _DDP + "_check_global_requires_backward_grad_sync | work.wait()": _NO_JOIN,
    _DDP + "_match_all_reduce_for_bwd_pass | work.wait()": _NO_JOIN,
    _INPUTS + "current_stream.wait_stream(stream)": _MOVED,
    _INPUTS + "output.data.record_stream(current_stream)": _MOVED,
    _INPUTS + "output.record_stream(current_stream)": _MOVED,
    _FUNCTIONAL + "all_gather_single | res.wait()": _NOT_FUNCTIONAL,
    _FUNCTIONAL + "all_reduce_backward | wait_tensor(output)": _NOT_FUNCTIONAL,
    _FUNCTIONAL + "all_gather_into_tensor_backward | wait_tensor(output)": _NOT_FUNCTIONAL,
    _FUNCTIONAL + "reduce_scatter_tensor_backward | wait_tensor(output)": _NOT_FUNCTIONAL,
    _FUNCTIONAL + "all_to_all_single_backward | wait_tensor(output)": _NOT_FUNCTIONAL,
    _FUNCTIONAL + "AsyncCollectiveTensor.trigger_wait | wait_tensor(self.elem)": _NOT_FUNCTIONAL,
    _FUNCTIONAL + "AsyncCollectiveTensor.numpy | self.wait()": _NOT_FUNCTIONAL,
    _FUNCTIONAL + "_maybe_wrap_tensor | wait_tensor(self)": _NOT_FUNCTIONAL,
}
# A barrier transfers no data.
OF_THE_HOST = {_C10D + "barrier | work.wait()"}


def of_torch() -> Iterator[str]:
    """Yield the synchronizations of ``MODULES``. In ``distributed_c10d``, only functions that roomier calls are
    included."""
    called = _called_collectives()
    for module in MODULES:
        for each in synchronizations(module):
            if not each.startswith(_C10D) or each.removeprefix(_C10D).split(" | ")[0] in called:
                yield each


def _called_collectives() -> set[str]:
    """Return the functions of ``torch.distributed`` that roomier calls, by their names in torch 2.13."""
    found = set()
    for file in Path(roomier.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist":
                found.add(_NEW_NAMES.get(node.attr, node.attr))
    return found


_NEW_NAMES = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}
