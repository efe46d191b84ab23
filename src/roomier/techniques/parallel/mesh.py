"""Device mesh of the ranks. The mesh defines which ranks share a replica of a model, and which ranks store the same
shard.

[Note: one mesh]
torch caches the result types of operators on DTensors and treats meshes of equal shape as equal. After a second mesh of
the same shape is created, a cached result can still refer to the first mesh. If a dry run clears the cache of only one
rank, the ranks would communicate in the process groups of different meshes, and hang. All runs of a process group
therefore use the same mesh.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from roomier.core import torch_private
from roomier.core.mesh import REPLICATE, SHARD, STAGE, Mesh

_group: Any = None  # process group to which the cached meshes belong
_meshes: dict[tuple[str, int, int, int], DeviceMesh] = {}


def make_mesh(device_type: str, mesh: Mesh) -> DeviceMesh:
    """Return the mesh with the dimension ``shard``, or with ``replicate`` and ``shard`` if there are several replicas.
    In a pipeline, the mesh contains the ranks of one stage.

    The mesh is created once for the default process group; see [Note: one mesh].

    Args:
        device_type: device type of the tensors, such as ``"cpu"`` or ``"cuda"``.
        mesh: arrangement of the ranks.
    """
    global _group
    key = (device_type, mesh.world.size, mesh.shards.size, mesh.stage)
    if not dist.is_initialized() or dist.get_backend() == "fake":  # a dry run
        return _create(*key)
    if dist.group.WORLD is not _group:
        _group = dist.group.WORLD
        _meshes.clear()
    if key not in _meshes:
        _meshes[key] = _create(*key)
    return _meshes[key]


def _create(device_type: str, num_ranks: int, num_shards: int, num_stages: int) -> DeviceMesh:
    with torch_private.without_interception():  # the ranks are stored in real tensors, even in a dry run
        if num_shards == num_ranks:
            return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=(SHARD,))
        shape = (num_ranks // num_shards, num_shards)
        if num_stages > 1:
            return init_device_mesh(device_type, shape, mesh_dim_names=(STAGE, SHARD))[SHARD]
        return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD))
