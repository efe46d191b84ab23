"""All-to-all and all-gather over the ranks of a run, on any backend. Each rank counts the bytes that it sends.

[Note: bytes sent]
:attr:`Exchange.bytes_sent` counts the payload that a rank sends to other ranks, regardless of the backend. For ``N``
rows, an all-to-all sends ``N - 1`` rows, and an all-gather sends the row of the rank ``N - 1`` times. (In a ring, the
rank instead sends each of ``N - 1`` rows once.) For comparison, an all-reduce of ``B`` bytes sends ``2 (N - 1) / N *
B`` (:func:`all_reduce_bytes`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Collectives of the default process group on rows of tensors. With one rank, each call returns its input.

    On the CPU, ranks use point-to-point calls, because the collectives of gloo copy the full tensor. On CUDA, ranks use
    the collectives of NCCL.

    Attributes:
        num_ranks: size of the process group.
        rank: rank of this process.
        bytes_sent: number of bytes that this rank has sent.
    """

    def __init__(self) -> None:
        is_joined = dist.is_available() and dist.is_initialized()
        self.num_ranks: int = dist.get_world_size() if is_joined else 1
        self.rank: int = dist.get_rank() if is_joined else 0
        self.bytes_sent = 0

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Return the rows that all ranks send to this rank. Row ``j`` of the result is row ``rank`` of the input on
        rank ``j``.

        Args:
            rows: ``[num_ranks, n]``, contiguous, with the same shape and dtype on all ranks.
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
        """All-gather ``rows`` (``[num_ranks, n]``, contiguous) in place. Before the call, each rank must set its own
        row.
        """
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
    """Return the number of bytes that a rank sends in a ring all-reduce of ``num_bytes``."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes
