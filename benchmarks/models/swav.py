"""SwAV: self-supervised learning by swapping the cluster assignments of views (Caron et al. 2020, arXiv 2006.09882).

The suffix of a tensor's name is its shape:

    B  images in the batch         D  length of an embedding
    V  views (crops) of an image   K  prototypes
    R  rows in an assignment       Q  embeddings in the queue
    M  embeddings on all ranks     H and W  height and width of a crop
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.resnet import ResNet
from roomier.core.errors import RoomierError

NUM_LARGE = 2
"""Number of large crops per image. The assignments of the large crops are predicted from the other crops."""


@dataclass(frozen=True)
class SwAVConfig:
    """Configuration of a :class:`SwAV`. The defaults describe ResNet-50 with the values of the paper.

    Attributes:
        depths: number of blocks in each stage of the trunk.
        channels: number of channels of the first convolution. 128 channels result in the network ``RN50w2`` of the
            paper.
        hidden_width: hidden size of the projection head.
        embedding_width: length of an embedding.
        num_prototypes: number of clusters.
        queue_length: number of embeddings from earlier batches that are used in the assignment of each large crop; 0
            disables the queue.
        temperature: temperature of the predicted assignments.
        epsilon: strength of the entropy regularization of the assignments.
        num_iterations: number of iterations of the Sinkhorn-Knopp algorithm.

    Raises:
        RoomierError: a value is not positive, or ``queue_length`` is negative.
    """

    depths: tuple[int, ...] = (3, 4, 6, 3)
    channels: int = 64
    hidden_width: int = 2048
    embedding_width: int = 128
    num_prototypes: int = 3000
    queue_length: int = 3840
    temperature: float = 0.1
    epsilon: float = 0.05
    num_iterations: int = 3

    def __post_init__(self) -> None:
        positive = ("channels", "hidden_width", "embedding_width", "num_prototypes", "num_iterations")
        for field in (*positive, "temperature", "epsilon"):
            if not getattr(self, field) > 0:
                raise RoomierError(field, getattr(self, field), "must be positive", "Use a positive value")
        if self.queue_length < 0:
            raise RoomierError("queue_length", self.queue_length, "must not be negative", "Use 0 for no queue")


class Prototypes(nn.Linear):
    """Cluster centers of unit length. The result is the cosine similarity of an embedding and each center.

    The weights are normalized in each forward pass. The reference implementation normalizes the stored weights before
    each step, which is not possible for a sharded parameter.
    """

    def __init__(self, width: int, num_prototypes: int) -> None:
        super().__init__(width, num_prototypes, bias=False)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return the similarities, ``[..., K]``, of embeddings of unit length."""
        return F.linear(embeddings.to(self.weight.dtype), F.normalize(self.weight, dim=-1))


class SwAV(nn.Module):
    """ResNet, projection head and prototypes, trained without labels.

    The model learns to predict the cluster assignment of one view of an image from another view. Assignments are
    computed with the Sinkhorn-Knopp algorithm over the batch of all ranks and the queue, so that all prototypes are
    used equally (section 3.1).

    Every rank stores the same queue with the embeddings of all ranks. The queue is part of a checkpoint and does not
    depend on the number of ranks. Empty rows of the queue are zero and have no weight in an assignment.

    Args:
        config: sizes of the model.

    Example:
        >>> model = SwAV(SwAVConfig())
        >>> loss = model(large_crops, small_crops)
    """

    queue: Tensor

    def __init__(self, config: SwAVConfig) -> None:
        super().__init__()
        self.config = config
        self.trunk = ResNet(config.depths, config.channels)
        self.projection = nn.Sequential(
            nn.Linear(self.trunk.num_features, config.hidden_width),
            nn.BatchNorm1d(config.hidden_width),
            nn.ReLU(),
            nn.Linear(config.hidden_width, config.embedding_width),
        )
        self.prototypes = Prototypes(config.embedding_width, config.num_prototypes)
        self.register_buffer("queue", torch.zeros(NUM_LARGE, config.queue_length, config.embedding_width))

    def forward(self, large_crops: Tensor, small_crops: Tensor | None = None) -> Tensor:
        """Return the loss of the swapped predictions (equation 2), which is the mean over images and pairs of views.

        In training mode, the embeddings of the large crops are added to the queue.

        Args:
            large_crops: ``[B, 2, 3, H, W]``.
            small_crops: ``[B, V - 2, 3, H, W]`` with a smaller H and W (multi-crop, section 3.3); None for no small
                crops.

        Raises:
            RoomierError: ``large_crops`` does not contain two crops of each image.
        """
        if large_crops.dim() != 5 or large_crops.shape[1] != NUM_LARGE:
            problem = f"must have the shape [images, {NUM_LARGE}, 3, height, width]"
            raise RoomierError("large_crops", tuple(large_crops.shape), problem, "Stack the crops in dimension 1")
        views = [self.embed(large_crops)]
        if small_crops is not None:
            views.append(self.embed(small_crops))
        embeddings_VBD = torch.cat(views)
        scores_VBK = self.prototypes(embeddings_VBD)
        assignments = self.assign(embeddings_VBD[:NUM_LARGE].detach())
        log_probs_VBK = (_at_least_float32(scores_VBK) / self.config.temperature).log_softmax(dim=-1)
        num_views = len(embeddings_VBD)
        terms = [
            -(assigned_BK * log_probs_VBK[view]).sum(dim=-1).mean()
            for large, assigned_BK in enumerate(assignments)
            for view in range(num_views)
            if view != large
        ]
        return torch.stack(terms).mean()

    def embed(self, crops: Tensor) -> Tensor:
        """Return embeddings of unit length, ``[V, B, D]``, of crops ``[B, V, 3, H, W]``."""
        num_images, num_views = crops.shape[:2]
        embeddings = self.projection(self.trunk(crops.transpose(0, 1).flatten(0, 1)))
        return F.normalize(embeddings, dim=-1).view(num_views, num_images, -1)

    @torch.no_grad()
    def assign(self, embeddings_VBD: Tensor) -> list[Tensor]:
        """Return the assignments of this rank's images for each large crop, ``[B, K]`` in float32 or a wider dtype.

        Args:
            embeddings_VBD: embeddings of the large crops of this rank.
        """
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if _has_ranks() else (0, 1)
        num_images = embeddings_VBD.shape[1]
        all_VMD = _from_all_ranks(_at_least_float32(embeddings_VBD).contiguous(), num_ranks)
        assignments = []
        for view, embeddings_MD in enumerate(all_VMD):
            rows_RD = torch.cat([embeddings_MD, self.queue[view].to(embeddings_MD.dtype)])
            weights_R = rows_RD.any(dim=-1).to(rows_RD.dtype)
            scores_RK = _at_least_float32(self.prototypes(rows_RD))
            assigned_RK = sinkhorn(scores_RK, weights_R, self.config.epsilon, self.config.num_iterations)
            assignments.append(assigned_RK[rank * num_images : (rank + 1) * num_images].clone())
        if self.training and self.config.queue_length:
            newest = torch.cat([all_VMD.to(self.queue.dtype), self.queue], dim=1)
            self.queue.copy_(newest[:, : self.config.queue_length])
        return assignments


def sinkhorn(scores_RK: Tensor, weights_R: Tensor, epsilon: float, num_iterations: int) -> Tensor:
    """Return soft assignments ``[R, K]`` that use all prototypes equally (equation 3, with algorithm 1 of appendix A).

    The elements of each row with weight 1 sum to 1. Rows with weight 0 neither affect other rows nor receive an
    assignment.

    Args:
        scores_RK: similarities of embeddings and prototypes.
        weights_R: 1 for a valid row, 0 for an empty row.
        epsilon: strength of the entropy regularization.
        num_iterations: number of iterations.
    """
    num_prototypes = scores_RK.shape[1]
    plan_RK = ((scores_RK - scores_RK.max()) / epsilon).exp_() * weights_R[:, None]
    tiny = torch.finfo(plan_RK.dtype).tiny
    for _ in range(num_iterations):
        plan_RK /= plan_RK.sum(dim=0, keepdim=True).clamp_(min=tiny) * num_prototypes
        plan_RK /= plan_RK.sum(dim=1, keepdim=True).clamp_(min=tiny)
    return plan_RK


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _from_all_ranks(embeddings_VBD: Tensor, num_ranks: int) -> Tensor:
    """Return the embeddings of all ranks, ``[V, M, D]``, in the order of the ranks."""
    if num_ranks == 1:
        return embeddings_VBD
    parts = [torch.empty_like(embeddings_VBD) for _ in range(num_ranks)]
    dist.all_gather(parts, embeddings_VBD)
    return torch.cat(parts, dim=1)
