"""The same Thinker script, with Colmena's classes and with ours, on Colmena's task server and on ours, over one mailbox."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import colmena.task_server.local
import colmena.thinker
import colmena.thinker.resources
import pytest
from steering_tasks import f, fail

from gradientmail_torch.errors import ConfigError
from gradientmail_torch.patterns import steering
from gradientmail_torch.patterns.steering import MailboxQueues, MailboxTaskServer
from gradientmail_torch.patterns.steering.colmena import ColmenaMailboxQueues

OURS = SimpleNamespace(
    BaseThinker=steering.BaseThinker,
    agent=steering.agent,
    result_processor=steering.result_processor,
    task_submitter=steering.task_submitter,
    ResourceCounter=steering.ResourceCounter,
)
THEIRS = SimpleNamespace(
    BaseThinker=colmena.thinker.BaseThinker,
    agent=colmena.thinker.agent,
    result_processor=colmena.thinker.result_processor,
    task_submitter=colmena.thinker.task_submitter,
    ResourceCounter=colmena.thinker.resources.ResourceCounter,
)


def script(library: Any, queues: Any) -> Any:
    """A campaign: minimize f by halving the step around the best point; in the end, one task that fails."""

    class Search(library.BaseThinker):
        def __init__(self) -> None:
            super().__init__(queues, library.ResourceCounter(2, ["sim"]))
            self.rec.reallocate(None, "sim", 2)
            self.best, self.step, self.seen = (4.0, f(4.0)), 4.0, 0
            self.error = None

        @library.agent(startup=True)
        def warn(self) -> None:
            self.queues.send_inputs("on purpose", method="fail", topic="odd", task_info={"why": "a test"})

        @library.result_processor(topic="odd")
        def odd(self, result: Any) -> None:
            self.error = (result.success, result.failure_info.exception, result.task_info)

        @library.task_submitter(task_type="sim", n_slots=1)
        def submit(self) -> None:
            side = 1 if self.seen % 2 else -1
            self.queues.send_inputs(self.best[0] + side * self.step, method="f", topic="sim")

        @library.result_processor(topic="sim")
        def learn(self, result: Any) -> None:
            self.seen += 1
            if result.value < self.best[1]:
                self.best = (result.args[0], result.value)
            elif self.seen % 2 == 0:
                self.step /= 2
            self.rec.release("sim", 1)
            if self.seen >= 12:
                self.done.set()

    return Search()


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"mailbox": str(tmp_path / "mailbox"), "topics": ["sim", "odd"], "name": "both", "poll_interval": 0.02, "lease": 10.0}


def our_server(settings: dict[str, Any], stack: ExitStack, serve: Callable[..., Any]) -> Any:
    return serve(MailboxTaskServer([f, fail], MailboxQueues(**settings), learner_id="ours", isolation="thread", slots=2))


def their_server(settings: dict[str, Any], stack: ExitStack, serve: Callable[..., Any]) -> Any:
    queues = ColmenaMailboxQueues(MailboxQueues(**settings), methods=["f", "fail"], slots=2, server_id="theirs")
    server = colmena.task_server.local.LocalTaskServer(queues, [f, fail], threads=True, num_workers=2)
    server.start()
    stack.callback(server.join)
    stack.callback(server.terminate)
    return server


@pytest.mark.parametrize("method", ["json", "pickle"])
@pytest.mark.parametrize("start", [our_server, their_server])
@pytest.mark.parametrize("library", [OURS, THEIRS], ids=["our_thinker", "their_thinker"])
def test_any_thinker_works_with_any_server(
    library: Any, start: Any, method: str, settings: dict[str, Any], stack: ExitStack, serve: Callable[..., Any]
) -> None:
    settings["serialization_method"] = method
    server = start(settings, stack, serve)
    queues = MailboxQueues(**settings)
    thinker = script(library, queues if library is OURS else ColmenaMailboxQueues(queues))
    thinker.run()
    assert thinker.seen >= 12
    assert abs(thinker.best[0]) < 4.0
    assert thinker.error[0] is False
    assert "on purpose" in thinker.error[1]
    assert thinker.error[2] == {"why": "a test"}
    thinker.queues.send_kill_signal()
    server.join(30)
    assert server.exitcode == 0
    assert queues.servers() == []


def test_a_server_must_say_what_it_offers(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs methods="):
        ColmenaMailboxQueues(MailboxQueues(**settings)).get_task(timeout=0)
