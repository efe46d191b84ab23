"""The ranks as a grid: which of them share one copy of a model, and which hold the same part of it."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from roomier.core import torch_private

REPLICATE, SHARD = "replicate", "shard"


def make_mesh(device_type: str, num_ranks: int, num_shards: int) -> DeviceMesh:
    """One dimension ``shard``; or two, ``replicate`` x ``shard``, where there are several copies.

    Neighbouring ranks share a copy, since they sit on one node.
    """
    with torch_private.without_interception():  # in a dry run as well, ranks are real numbers
        if num_shards == num_ranks:
            return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=(SHARD,))
        shape = (num_ranks // num_shards, num_shards)
        return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD))
