"""Device mesh of the ranks. The mesh defines which ranks share a replica of a model, and which ranks store the same
shard."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from roomier.core import torch_private

REPLICATE, SHARD = "replicate", "shard"


def make_mesh(device_type: str, num_ranks: int, num_shards: int) -> DeviceMesh:
    """Create a mesh with the dimension ``shard``, or with ``replicate`` x ``shard`` if there are several replicas.

    Consecutive ranks share a replica, because they are usually on the same node.

    Args:
        device_type: device type of the tensors, such as ``"cpu"`` or ``"cuda"``.
        num_ranks: number of ranks of the run.
        num_shards: number of ranks that share a replica.
    """
    with torch_private.without_interception():  # the ranks are stored in real tensors, even in a dry run
        if num_shards == num_ranks:
            return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=(SHARD,))
        shape = (num_ranks // num_shards, num_shards)
        return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD))
