"""A point where the payloads of several parties meet and a function runs once."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

from gradientmail_torch.clock import SYSTEM_CLOCK, Clock, check_timeout
from gradientmail_torch.keys import SyncKeys
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.patterns.synchronization.dag import Dag, Trigger
from gradientmail_torch.patterns.synchronization.ledger import Call
from gradientmail_torch.patterns.synchronization.party import Party, Settings
from gradientmail_torch.patterns.synchronization.runner import Function, Result


class SynchronizationNode:
    """Receives a payload from every predecessor and runs one function when all have called or been skipped.

    ::

        node = SynchronizationNode("evaluate", predecessors=["shard-0", "shard-1"], mailbox=box, learner_id="node-0", run_id="epoch-7")
        node.call("shard-0", {"loss": 1.5, "count": 100})       # skip("shard-0") where it will not come
        result = node.wait(lambda data, invocation: reduce(data.values()), timeout=600)

    Any number of machines may hold the node and wait; one of those that see it complete runs the function, and all get
    the one committed result. If that machine dies, another takes over after ``lease`` seconds and runs it again
    (``invocation.attempt`` tells the runs apart); the first run to end counts.

    Payloads and results are JSON values (NaN too), bytes, or open binary files of any size, which stream: the
    function gets those as :class:`StoredFile`. Up to 8 KiB a payload costs one put, above it two; a node costs a
    manifest, a claim, an outcome, a heartbeat every ``lease / 5`` seconds that the function takes, and the result if it
    is large. Parties that open a new node within one round trip of each other may each pay for its manifest. Who calls
    last runs the function, else who called the first predecessor; where they have not begun one ``poll_interval``
    later, up to 8 others may, then up to 64, so that few pay for a claim that is refused. 1 GiB passes in 54 MiB of
    memory over S3, 16 MiB over a directory.

    Args:
        name: any text; with ``run_id`` it serves once.
        predecessors: names of those that call, in the order in which the function sees them.
        mailbox: the run's mailbox, or its URL.
        learner_id: who this is.
        run_id: separates the uses of one mailbox.
        trigger: ``any_called`` (default) skips the node when all predecessors were skipped; ``all_called`` when one
            of them was; ``all_reached`` runs it anyway.
        lease: seconds without a heartbeat after which another party takes a run over; the same for all parties.
        poll_interval: seconds between two looks of a waiting party, at two or three requests each.
        max_attempts: runs that may be lost to dead machines before the node is given up.
        outage_timeout: seconds that the mailbox may be away.
        max_freeze: seconds for which a function may freeze all threads of this process, by one long call into C that
            holds Python's global lock. Above 0, a helper process beats meanwhile; the mailbox must then be a URL.
    """

    def __init__(
        self,
        name: str,
        predecessors: Sequence[str],
        mailbox: Mailbox | str | os.PathLike[str],
        learner_id: str,
        *,
        run_id: str = "run",
        trigger: Trigger = "any_called",
        lease: float = 60.0,
        poll_interval: float = 1.0,
        max_attempts: int | None = 5,
        outage_timeout: float = 600.0,
        max_freeze: float = 0.0,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        self.name = name
        self._party = Party(
            mailbox,
            SyncKeys.of_node(run_id, name),
            Dag.of_node(name, predecessors, trigger),
            learner_id=learner_id,
            settings=Settings(
                lease=lease,
                poll_interval=poll_interval,
                max_attempts=max_attempts,
                outage_timeout=outage_timeout,
                max_freeze=max_freeze,
            ),
            clock=clock,
            rng=rng,
        )

    def call(self, predecessor: str, payload: object = None) -> Call:
        """Hand in the payload of ``predecessor``, which counts once, whatever it is.

        Raises :class:`ConfigError` for an unknown predecessor or a payload that cannot travel, and
        :class:`SynchronizationExpired` when the node has been swept away.
        """
        accepted = self._party.runner.call(self.name, predecessor, payload)
        return Call(accepted, self._party.runner.is_complete(self.name))

    def skip(self, predecessor: str) -> Call:
        """Say that ``predecessor`` will not call."""
        accepted = self._party.runner.skip(self.name, predecessor)
        return Call(accepted, self._party.runner.is_complete(self.name))

    def wait(self, function: Function | None = None, timeout: float | None = None) -> Result:
        """Wait for the node's outcome; run ``function(data, invocation)`` if it falls to this party.

        Without a function it only waits. ``data`` holds the payloads of the predecessors that called. Raises
        :class:`WorkFailed` with the traceback when the function raised, here or elsewhere; :class:`WorkFenced` when
        it ran here, but another attempt had finished first (``wait`` again for the outcome); ``TimeoutError`` after
        ``timeout`` seconds, naming who is missing. Nothing is lost by it: ``wait`` again resumes.
        """
        check_timeout(timeout)
        return self._party.wait(self.name, function, timeout)
