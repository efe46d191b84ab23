"""Methods ``to_onnx`` and ``to_torchscript``, with the same names as in Lightning. The folder ``export`` implements
both methods."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

if TYPE_CHECKING:
    import torch
    from torch import nn


class Exports:
    """Export methods of :class:`roomier.Module`."""

    # TorchScript compiles all properties of a class except those listed here, which an exported model does not need.
    __jit_unused_properties__: ClassVar[list[str]] = [
        *("trainer", "is_attached", "current_epoch", "global_step", "global_rank", "local_rank", "logger", "loggers"),
        *("on_gpu", "device", "dtype", "hparams", "logged_hparams", "hparams_initial", "fabric"),
    ]

    def to_onnx(self, file_path: str | Path | BytesIO | None = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Export this module in evaluation mode as an ONNX file for any batch size.

        The file is run with onnxruntime, and its outputs are compared with the outputs of the module.

        Args:
            file_path: path of the file; None returns the program without writing a file.
            input_sample: input of ``forward``: a tensor, a tuple of the arguments, or a dict of keyword arguments.
                Default: ``self.example_input_array``.
            kwargs: arguments of ``torch.onnx.export``, and ``max_difference``: the largest allowed difference between
                the outputs, relative to the largest value (default 1e-4).

        Returns:
            The ``torch.onnx.ONNXProgram``.

        Raises:
            RoomierError: a package is missing (``pip install "roomier[onnx]"``), the module cannot be exported, or the
                outputs differ.
        """
        from roomier.checkpoint.export.onnx import export_onnx  # late import: a module of a higher layer

        return export_onnx(cast("nn.Module", self), file_path, input_sample, may_exist=True, **kwargs)

    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: Literal["script", "trace"] = "script",
        example_inputs: Any = None,
        **kwargs: Any,
    ) -> torch.jit.ScriptModule:
        """Convert this module in evaluation mode to TorchScript.

        Args:
            file_path: path of the file; None returns the module without writing a file.
            method: ``"script"`` compiles the code of ``forward``. ``"trace"`` records the operations of ``forward`` for
                one input.
            example_inputs: the inputs for ``"trace"``. Default: ``self.example_input_array``.
            kwargs: arguments of ``torch.jit.script`` or ``torch.jit.trace``.

        Raises:
            RoomierError: the module cannot be converted, or the outputs of the converted module and of this module
                differ.
        """
        from roomier.checkpoint.export.torchscript import export_torchscript  # late import: a module of a higher layer

        return export_torchscript(
            cast("nn.Module", self), file_path, method=method, example_inputs=example_inputs, may_exist=True, **kwargs
        )
