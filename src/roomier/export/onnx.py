"""ONNX: the graph of a model for other runtimes, by torch's dynamo exporter, held against the model by onnxruntime."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.export.compared import MAX_DIFFERENCE, check_same
from roomier.export.examples import Example, example_of
from roomier.export.output_file import replacing_file
from roomier.export.ready import quietly, ready_for_export
from roomier.export.torch_export import graph_of

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_LARGEST_BYTES = 3 * 2**29  # of weights in one file: protobuf ends at 2 GiB
_GOES_ITS_OWN_WAY = ("dynamo", "dynamic_axes")


def export_onnx(
    model: nn.Module,
    output: str | Path | BytesIO | None = None,
    sample: Any = None,
    *,
    max_difference: float = MAX_DIFFERENCE,
    may_exist: bool = False,
    **options: Any,
) -> Any:
    """``model`` as the ONNX file ``output``, whole or not at all; weights beyond 1.5 GiB go into ``<output>.data``.

    The batch size is left open. What was written is run by onnxruntime on the CPU, with the example, with other values
    and with another batch size, and must return what the model returns.

    Args:
        sample: what forward is called with: see :func:`roomier.export.examples.example_of`.
        max_difference: of an output, over its largest value.
        options: for ``torch.onnx.export``: ``dynamic_shapes`` (``{}`` fixes all), ``input_names``, ``opset_version``.

    Returns:
        torch's ``ONNXProgram``; None with ``dynamo=False``.

    Raises:
        RoomierError: a package is missing, the model has no graph that is the same for all inputs, it has an operation
            without a counterpart, or the outputs differ.
    """
    lacking = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        problem = f"needs {', '.join(lacking)}, which {'is' if len(lacking) == 1 else 'are'} not installed"
        raise RoomierError("to onnx", type(model).__name__, problem, 'Run `pip install "roomier[onnx]"`')
    in_memory = output is None or isinstance(output, BytesIO)
    with ready_for_export(model, "onnx") as plain, tempfile.TemporaryDirectory() as scratch:
        example = example_of(plain, sample, "input_sample").with_batch()
        where: str | Path = Path(scratch) / "model.onnx" if in_memory else output  # type: ignore[assignment]
        with replacing_file(where, may_exist=may_exist) as target:
            program = _write(plain, example, target, options)
            done = check_same(
                plain,
                _session(plain, target),
                example,
                fixed_shapes=bool({"dynamic_shapes", *_GOES_ITS_OWN_WAY} & options.keys()),
                max_difference=max_difference,
                to="onnx",
            )
            if isinstance(output, BytesIO):
                _check_in_one_file(model, target)
                output.write(target.read_bytes())
    notice(f"{'onnx' if in_memory else output}: {done}")
    return program


def _write(model: nn.Module, example: Example, target: Path, options: dict[str, Any]) -> Any:
    num_bytes = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    common = {"external_data": num_bytes > _LARGEST_BYTES, "verbose": False, **options}
    try:
        if any(name in options for name in _GOES_ITS_OWN_WAY):
            with quietly():
                return torch.onnx.export(model, example.args, str(target), kwargs=example.kwargs or None, **common)
        shapes = common.pop("dynamic_shapes", None)
        program = graph_of(model, example, shapes, "onnx")
        with quietly():
            return torch.onnx.export(program, (), str(target), **common)
    except (RoomierError, OSError):  # the disk's are told by who made the file
        raise
    except Exception as error:
        text = " ".join(str(error.__cause__ or error).split())[:300]
        action = (
            "Write the operation that is named with others, or pass a custom_translation_table; torch-export keeps it"
        )
        problem = f"cannot be translated ({type(error).__name__}: {text})"
        raise RoomierError("to onnx", type(model).__name__, problem, action) from error


def _check_in_one_file(model: nn.Module, path: Path) -> None:
    others = [each.name for each in path.parent.iterdir() if each != path]
    if others:
        problem = "has its weights in a second file, and there is one buffer"
        raise RoomierError("to onnx", type(model).__name__, problem, "Pass the name of a file instead of a BytesIO")


def _session(model: nn.Module, path: Path) -> Any:
    import onnxruntime  # type: ignore[import-untyped]  # slow to import, and needed only here

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own kinds, derived from no other
        problem = f"was written, and onnxruntime cannot run it on the CPU ({' '.join(str(error).split())[:300]})"
        action = "Export a copy in float32: model.float(); torch-export keeps every dtype"
        raise RoomierError("to onnx", type(model).__name__, problem, action) from error
    names = [each.name for each in session.get_inputs()]

    def run(example: Example) -> Sequence[Tensor]:
        tensors = dict(zip(names, (each.detach().cpu().numpy() for each in example.tensors()), strict=True))
        return [torch.from_numpy(each) for each in session.run(None, tensors)]

    return run
