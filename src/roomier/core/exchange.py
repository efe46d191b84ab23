"""All-to-all and all-gather among the ranks of a run, on any backend, with a count of the bytes that were sent.

[Note: bytes sent]
Counted is the payload that a rank must hand to others, whatever the backend makes of it: of ``N`` rows an all-to-all
sends ``N - 1``, an all-gather sends its own row ``N - 1`` times (around a ring: ``N - 1`` rows once). The measure to
compare with is an all-reduce of ``B`` bytes, which sends ``2 (N - 1) / N * B`` (:func:`all_reduce_bytes`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Rows of tensors between all ranks of the default process group; with one rank, each call is the identity.

    On the CPU each rank sends each other rank what it needs (gloo's own collectives go through full-size copies); on
    CUDA these are NCCL's collectives.

    Attributes:
        num_ranks, rank: of the group.
        bytes_sent: by this rank, so far.
    """

    def __init__(self) -> None:
        is_joined = dist.is_available() and dist.is_initialized()
        self.num_ranks: int = dist.get_world_size() if is_joined else 1
        self.rank: int = dist.get_rank() if is_joined else 0
        self.bytes_sent = 0

    def all_to_all(self, rows: Tensor) -> Tensor:
        """What each rank had for this one: row ``j`` of the result is the row ``rank`` of rank ``j``.

        Args:
            rows: ``[num_ranks, n]``, contiguous, of one shape and dtype on all ranks.
        """
        if self.num_ranks == 1:
            return rows
        received = torch.empty_like(rows)
        self._count(rows)
        if rows.is_cpu:
            received[self.rank] = rows[self.rank]
            self._swap(list(rows), list(received))
        else:
            dist.all_to_all_single(received, rows)
        return received

    def all_gather(self, rows: Tensor) -> None:
        """Fill ``rows`` (``[num_ranks, n]``, contiguous), of which this rank has filled its own, with those of all."""
        if self.num_ranks == 1:
            return
        self._count(rows)
        if rows.is_cpu:
            self._swap([rows[self.rank]] * self.num_ranks, list(rows))
        else:
            dist.all_gather_into_tensor(rows, rows[self.rank].clone())

    def _count(self, rows: Tensor) -> None:
        self.bytes_sent += rows.nbytes // self.num_ranks * (self.num_ranks - 1)

    def _swap(self, sent: list[Tensor], received: list[Tensor]) -> None:
        operations = [
            dist.P2POp(function, tensors[peer], peer)
            for peer in range(self.num_ranks)
            if peer != self.rank
            for function, tensors in ((dist.isend, sent), (dist.irecv, received))
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def all_reduce_bytes(num_bytes: int, num_ranks: int) -> float:
    """What a rank sends in an all-reduce of ``num_bytes``: a reduce-scatter and an all-gather around a ring."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes
