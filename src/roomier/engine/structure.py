"""The structure of a module before a run, to which the module can return after the run sharded its parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from roomier.core import torch_private
from roomier.engine.materialise import on_meta

_OF_MODULES = frozenset(nn.Module().__dict__)


class Structure:
    """Classes, hooks and tensors of the parts of ``module``. Parameters are stored without their values.

    Other attributes keep their values when the structure is restored, because user code can change them during a run.
    """

    def __init__(self, module: nn.Module) -> None:
        empty = {id(each): on_meta(each) for each in module.parameters()}
        self._parts = []
        for part in module.modules():
            fields = {name: self._copied(value) for name, value in vars(part).items()}
            fields["_parameters"] = {
                name: None if each is None else empty[id(each)] for name, each in part._parameters.items()
            }
            self._parts.append((part, type(part), fields))

    @staticmethod
    def _copied(value: Any) -> Any:
        return value.copy() if isinstance(value, dict) else value

    def restore(self) -> None:
        """Return the module to this structure. Its parameters are on the meta device afterwards."""
        for part, kind, fields in self._parts:
            part.__class__ = kind
            torch_private.forget_sharding(part)
            own = vars(part)
            for name in [name for name in own if name not in fields and name.startswith("_roomier")]:
                del own[name]
            own.update({name: self._copied(fields[name]) for name in fields if name in _OF_MODULES or name not in own})
