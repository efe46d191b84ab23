"""``to_onnx`` and ``to_torchscript``: names that Lightning made known; the work is the export layer's."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

if TYPE_CHECKING:
    import torch
    from torch import nn


class Exports:
    """What :class:`roomier.Module` can be written as, for others to run."""

    # TorchScript compiles the properties of a class: none of these belongs to a model that is run elsewhere.
    __jit_unused_properties__: ClassVar[list[str]] = [
        *("trainer", "is_attached", "current_epoch", "global_step", "global_rank", "local_rank", "logger", "loggers"),
        *("on_gpu", "device", "dtype", "hparams", "logged_hparams", "hparams_initial", "fabric"),
    ]

    def to_onnx(self, file_path: str | Path | BytesIO | None = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Write this module, in evaluation mode, as an ONNX file for any batch size, and run that by onnxruntime: it
        must return what the module returns.

        Args:
            file_path: where to; None only makes it.
            input_sample: what ``forward`` is called with: a tensor, a tuple of the arguments, or a dict of them by
                name; by default ``self.example_input_array``.
            kwargs: for ``torch.onnx.export``; and ``max_difference`` of the outputs, over the largest value (1e-4).

        Returns:
            torch's ``ONNXProgram``.

        Raises:
            RoomierError: a package is missing (``pip install "roomier[onnx]"``), or what is in the way of a graph.
        """
        from roomier.export.onnx import export_onnx  # late: a higher layer

        return export_onnx(cast("nn.Module", self), file_path, input_sample, may_exist=True, **kwargs)

    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: Literal["script", "trace"] = "script",
        example_inputs: Any = None,
        **kwargs: Any,
    ) -> torch.jit.ScriptModule:
        """This module, in evaluation mode, in TorchScript.

        Args:
            file_path: where it is saved too; None for nowhere.
            method: ``"script"`` translates the code of ``forward``, ``"trace"`` writes down what it does for one input.
            example_inputs: that input; by default ``self.example_input_array``.
            kwargs: for ``torch.jit.script`` or ``torch.jit.trace``.

        Raises:
            RoomierError: it cannot be translated, or a trace of it returns something else for other inputs.
        """
        from roomier.export.torchscript import export_torchscript  # late: a higher layer

        return export_torchscript(
            cast("nn.Module", self), file_path, method=method, example_inputs=example_inputs, may_exist=True, **kwargs
        )
