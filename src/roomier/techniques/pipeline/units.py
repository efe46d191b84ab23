"""Units of a pipeline: the modules whose calls are distributed to stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from roomier.api.blocks import open_blocks

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def find_units(network: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the blocks, and the outermost modules outside of the blocks that have parameters or contain dropout, by
    name.

    The inner blocks are units in place of a block that consists of blocks. If ``blocks`` is empty, the members of lists
    are units, because a single layer can be called several times, as in ALBERT. Without such members, the layers of
    ``nn.Sequential`` are units.

    The network and modules that contain units are not units. Containers that are never called are replaced by their
    members.
    """
    units = set(open_blocks(blocks))
    if not units:
        lists = [each for each in network.modules() if isinstance(each, nn.ModuleList)]
        units = {each for members in lists for each in members if any(True for _ in each.children())}
    around = {each for each in network.modules() if any(part in units for part in each.modules()) and each not in units}
    around.add(network)
    containers = _NEVER_CALLED if units else (*_NEVER_CALLED, nn.Sequential)

    def search(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in units:
            yield name, module
        elif module in around or isinstance(module, containers):
            for child_name, child in module.named_children():
                yield from search(f"{name}.{child_name}".lstrip("."), child)
        elif next(module.parameters(), None) is not None or _draws(module):
            yield name, module

    return dict(search("", network))


def _draws(module: nn.Module) -> bool:
    return any(isinstance(each, _DROPOUT) for each in module.modules())
