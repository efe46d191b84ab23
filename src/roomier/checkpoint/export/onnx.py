"""Export of a model to ONNX with torch's dynamo exporter. The outputs in onnxruntime are compared with the outputs of
the model."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roomier.checkpoint.export.compared import (
    MAX_DIFFERENCE,
    Example,
    check_same,
    example_of,
    quietly,
    ready_for_export,
)
from roomier.checkpoint.export.output_file import replacing_file
from roomier.checkpoint.export.torch_export import graph_of
from roomier.core.errors import RoomierError
from roomier.core.log import notice

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_LARGEST_BYTES = 3 * 2**29  # Maximum size of weights in one file, because a protobuf file is limited to 2 GiB.
_CUSTOM_EXPORT = ("dynamo", "dynamic_axes")  # Options that bypass torch.export.


def export_onnx(
    model: nn.Module,
    output: str | Path | BytesIO | None = None,
    sample: Any = None,
    *,
    max_difference: float = MAX_DIFFERENCE,
    may_exist: bool = False,
    **options: Any,
) -> Any:
    """Write ``model`` to the ONNX file ``output``, atomically.

    Weights of more than 1.5 GiB are written to ``<output>.data``. The batch size is dynamic by default. onnxruntime
    runs the exported model on the CPU with the example, with different values and, unless ``options`` determine the
    shapes, with a different batch size. The outputs must not differ from the outputs of the model by more than
    ``max_difference``.

    Args:
        output: new file, or a buffer. If None, the export is only checked.
        sample: arguments of ``forward``; see :func:`roomier.checkpoint.export.compared.example_of`.
        max_difference: largest accepted difference of an output, relative to the largest absolute value of the output
            or to 1, whichever is greater.
        may_exist: if True, replace an existing file.
        options: arguments of ``torch.onnx.export``: ``dynamic_shapes`` (``{}`` fixes all sizes), ``input_names``,
            ``opset_version``, ...

    Returns:
        torch's ``ONNXProgram``; None if ``dynamo`` is False.

    Raises:
        RoomierError: a package is missing, the model cannot be exported as one graph for all inputs, ONNX does not
            support an operation, the outputs differ, or ``output`` already exists.
    """
    lacking = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        problem = f"requires {', '.join(lacking)}, which {'is' if len(lacking) == 1 else 'are'} not installed"
        raise RoomierError("to onnx", type(model).__name__, problem, 'Run `pip install "roomier[onnx]"`')
    in_memory = output is None or isinstance(output, BytesIO)
    with ready_for_export(model, "onnx") as plain, tempfile.TemporaryDirectory() as scratch:
        example = example_of(plain, sample, "input_sample").with_batch()
        where: str | Path = Path(scratch) / "model.onnx" if in_memory else output  # type: ignore[assignment]
        with replacing_file(where, may_exist=may_exist) as target:
            program = _write(plain, example, target, options)
            is_fixed = bool({"dynamic_shapes", *_CUSTOM_EXPORT} & options.keys())
            session = _session(plain, target)
            done = check_same(plain, session, example, "onnx", max_difference, fixed_shapes=is_fixed)
            if isinstance(output, BytesIO):
                _check_in_one_file(model, target)
                output.write(target.read_bytes())
    notice(f"{'onnx' if in_memory else output}: {done}")
    return program


def _write(model: nn.Module, example: Example, target: Path, options: dict[str, Any]) -> Any:
    num_bytes = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    common = {"external_data": num_bytes > _LARGEST_BYTES, "verbose": False, **options}
    try:
        if any(name in options for name in _CUSTOM_EXPORT):
            with quietly():
                return torch.onnx.export(model, example.args, str(target), kwargs=example.kwargs or None, **common)
        shapes = common.pop("dynamic_shapes", None)
        program = graph_of(model, example, shapes, "onnx")
        with quietly():
            return torch.onnx.export(program, (), str(target), **common)
    except (RoomierError, OSError):  # replacing_file converts disk errors
        raise
    except Exception as error:
        text = " ".join(str(error.__cause__ or error).split())[:300]
        action = "Replace this operation, or pass a custom_translation_table. torch-export supports all operations"
        problem = f"cannot be translated to ONNX ({type(error).__name__}: {text})"
        raise RoomierError("to onnx", type(model).__name__, problem, action) from error


def _check_in_one_file(model: nn.Module, path: Path) -> None:
    others = [each.name for each in path.parent.iterdir() if each != path]
    if others:
        problem = "requires a second file for its weights, but the output is a buffer"
        raise RoomierError("to onnx", type(model).__name__, problem, "Pass the name of a file instead of a BytesIO")


def _session(model: nn.Module, path: Path) -> Any:
    import onnxruntime  # type: ignore[import-untyped]  # slow import, used only here

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # errors of onnxruntime have no common base class
        problem = f"was exported, but onnxruntime cannot run it on the CPU ({' '.join(str(error).split())[:300]})"
        action = "Export a copy in float32 with model.float(). torch-export supports all dtypes"
        raise RoomierError("to onnx", type(model).__name__, problem, action) from error
    names = [each.name for each in session.get_inputs()]

    def run(example: Example) -> Sequence[Tensor]:
        tensors = dict(zip(names, (each.detach().cpu().numpy() for each in example.tensors()), strict=True))
        return [torch.from_numpy(each) for each in session.run(None, tensors)]

    return run
