"""Connection to the lighthouse of torchft, which determines the surviving nodes of a run on several machines."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

from roomier.core.errors import RoomierError

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Name of torchft's environment variable: address of the lighthouse, such as ``"http://host:29510"``."""

_BEAT_S = 0.2
_CONNECT = timedelta(seconds=10)


class Lighthouse:
    """Connection of this rank, to which a thread sends heartbeats until :meth:`close`.

    Args:
        address: address of the lighthouse.
        run: name that the ranks of one process group share.
        rank: number of this rank in this process group.
        host: IPv4 address of this node, at which the other nodes can reach it.

    Raises:
        RoomierError: torchft is not installed, or the lighthouse cannot be reached.
    """

    def __init__(self, address: str, run: str, rank: int, host: str) -> None:
        try:
            from torchft.coordination import LighthouseClient
        except ImportError as error:
            action = "Install it with `pip install torchft`"
            raise RoomierError(LIGHTHOUSE, address, "requires the package torchft", action) from error
        self.run, self.host = run, host
        self._name = f"{run}/{rank}"
        try:
            self._client, beats = LighthouseClient(address, _CONNECT), LighthouseClient(address, _CONNECT)
            beats.heartbeat(self._name, _CONNECT)
        except Exception as error:  # torchft raises several types
            action = "Start it with `torchft_lighthouse --min_replicas 1`, and set the variable to its address"
            raise RoomierError(LIGHTHOUSE, address, f"cannot be reached: {error}", action) from error
        self._stop = threading.Event()
        threading.Thread(target=self._beat, args=(beats,), name="roomier-lighthouse", daemon=True).start()

    def members(self, store: str, data: dict[str, Any], timeout_s: float) -> dict[int, tuple[str, dict[str, Any]]]:
        """Wait until all ranks with heartbeats call this method.

        Args:
            store: address of a store that this rank serves; may be empty.
            data: values that the other ranks receive.

        Returns:
            The address and the values of each of these ranks, keyed by rank.

        Raises:
            RuntimeError: the ranks did not call this method in time, or the lighthouse has ended.
        """
        found = self._client.quorum(self._name, timedelta(seconds=timeout_s), store_address=store, data=data)
        return {
            int(rank): (each.store_address, each.data)
            for each in found.participants
            for run, _, rank in [each.replica_id.rpartition("/")]
            if run == self.run
        }

    def close(self) -> None:
        """Stop the heartbeats."""
        self._stop.set()

    def _beat(self, client: Any) -> None:
        while not self._stop.wait(_BEAT_S):
            with suppress(Exception):  # the lighthouse is needed only after a loss
                client.heartbeat(self._name, _CONNECT)
