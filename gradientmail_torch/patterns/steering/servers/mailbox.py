"""A task server for elastic nodes: it joins when it starts, and may be killed at any moment."""

from __future__ import annotations

from collections.abc import Iterable

from gradientmail_torch.keys import check_learner_id
from gradientmail_torch.patterns.steering.methods import Method
from gradientmail_torch.patterns.steering.queues.base import TaskQueues
from gradientmail_torch.patterns.steering.servers.engine import Isolation, Settings
from gradientmail_torch.patterns.steering.servers.local import SlotTaskServer


class MailboxTaskServer(SlotTaskServer):
    """Runs tasks on this node, ``slots`` at a time, each in a process of its own that is made for it alone.

    So CUDA is safe in a task, its memory comes back, its main thread is free for Lightning, and when it crashes,
    that is its result. The node holds no more tasks than it has slots. It keeps their leases; it kills a task that
    was cancelled, ran over its wall time, or was taken over by another node while this one was out of reach. On
    SIGTERM, or :meth:`stop`, it gives its tasks back, and other nodes take them at once.

    Args:
        methods: functions that tasks may ask for, by their names.
        queues: :class:`MailboxQueues`, the same as the Thinker's.
        learner_id: this node's name.
        slots: tasks at a time.
        spare: prepare the next task's process while one runs, so that it begins at once. Takes the memory of an idle
            process per slot, with what the methods import.
        isolation: ``process``; or ``thread``, where a task begins sooner and cannot be killed.
        walltime_s: seconds after which a task is killed and has failed; a task's own ``resources={"walltime_s": …}`` goes first.
        start_method: how the processes are made: ``spawn``, each imports what the methods need, seconds with Lightning; or
            ``forkserver``, where one process imports it once and tasks begin at once, which is safe as long as no import
            touches the GPU.
        watch_interval_s: seconds between two looks whether a running task is still wanted.
        outage_timeout_s: seconds that the mailbox may be away before this server gives up.
    """

    def __init__(
        self,
        methods: Iterable[Method],
        queues: TaskQueues,
        *,
        learner_id: str,
        slots: int = 1,
        isolation: Isolation = "process",
        spare: bool = True,
        walltime_s: float | None = None,
        watch_interval_s: float = 5.0,
        outage_timeout_s: float = 600.0,
        timeout: float | None = None,
        start_method: str = "spawn",
    ) -> None:
        super().__init__(methods, queues, slots=slots, timeout=timeout, start_method=start_method, name=check_learner_id(learner_id))
        self.outage_timeout_s = outage_timeout_s
        self._settings = Settings(
            isolation=isolation,
            fresh=True,
            spare=spare,
            start_method=start_method,
            walltime_s=walltime_s,
            watch_interval_s=watch_interval_s,
            outage_timeout_s=outage_timeout_s,
        )
