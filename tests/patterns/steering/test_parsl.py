"""The engine for clusters: Parsl, with its real high-throughput executor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from steering_tasks import count_up, crash, f, fail, fail_times, htex, leave, same, where

from gradientmail_torch.errors import ConfigError
from gradientmail_torch.patterns.steering import BaseThinker, MailboxQueues, ParslTaskServer, PipeQueues, agent

METHODS = [f, same, fail, leave, crash, count_up, fail_times, where]


@pytest.fixture
def parsl_server(serve: Callable[..., Any], tmp_path: Path) -> Callable[..., ParslTaskServer]:
    def start(queues: Any, *, methods: Any = METHODS, **settings: Any) -> ParslTaskServer:
        server: ParslTaskServer = serve(ParslTaskServer(methods, queues, htex(str(tmp_path / "runinfo")), **settings))
        return server

    return start


def ended(server: ParslTaskServer, queues: Any) -> None:
    queues.send_kill_signal()
    server.join(60)
    assert server.exitcode == 0


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_the_programs_of_the_guide(pipes: Callable[..., PipeQueues], parsl_server: Any, start_method: str) -> None:
    class Thinker(BaseThinker):
        def __init__(self, queues: PipeQueues, to_run: list[float]) -> None:
            super().__init__(queues)
            self.to_run = to_run

        @agent
        def run_batch(self) -> None:
            # Submit computations
            for x in self.to_run:
                self.queues.send_inputs(x, method="f")

            # Collect results
            results = [self.queues.get_result() for _ in range(len(self.to_run))]

            # Find best
            best_ind = np.argmin([r.value for r in results])
            self.best = results[best_ind].args

    queues = pipes()
    doer = parsl_server(queues, methods=[f], start_method=start_method)
    thinker = Thinker(queues, [3, -1, 0.5, 2])
    thinker.run()
    assert thinker.best == (0.5,)
    ended(doer, queues)


def test_failures_streams_and_retries(pipes: Callable[..., PipeQueues], parsl_server: Any, tmp_path: Path) -> None:
    queues = pipes("a", keep_inputs=False)
    doer = parsl_server(queues)
    (tmp_path / "tries").mkdir()
    queues.send_inputs("wrong", method="fail")
    queues.send_inputs(3, method="leave")
    queues.send_inputs(1, method="elsewhere")
    queues.send_inputs(2, str(tmp_path / "tries"), method="fail_times", max_retries=2)
    results = {result.method: result for result in (queues.get_result(timeout=30) for _ in range(4))}
    assert "wrong" in results["fail"].failure_info.traceback
    assert "SystemExit" in results["leave"].failure_info.exception
    assert "is not offered here" in results["elsewhere"].failure_info.exception
    assert (results["fail_times"].value, results["fail_times"].retries) == (3, 2)
    queues.send_inputs(3, method="count_up", topic="a")
    assert [queues.get_result("a", timeout=30).value for _ in range(4)] == [0, 1, 2, 3]
    queues.send_inputs(method="crash")
    assert "WorkerLost" in queues.get_result(timeout=30).failure_info.exception
    queues.send_inputs(method="where", resources={"cpu_threads": 2})
    result = queues.get_result(timeout=30)
    assert result.value["threads"] == 2
    assert result.overhead().engine_s > 0
    ended(doer, queues)


def test_a_cluster_serves_a_mailbox(tmp_path: Path, parsl_server: Any) -> None:
    queues = MailboxQueues(str(tmp_path / "mailbox"), poll_interval=0.02)
    doer = parsl_server(queues, methods=[(f, {"executors": ["htex"]}), same], slots=2)
    for x in (3, 0.5, 2):
        queues.send_inputs(x, method="f")
    queues.send_inputs(np.arange(100_000), method="same")
    results = [queues.get_result(timeout=30) for _ in range(4)]
    assert min((result for result in results if result.method == "f"), key=lambda result: result.value).args == (0.5,)
    ended(doer, queues)


@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")  # Parsl's own
def test_a_configuration_that_ships_with_parsl_can_be_given_to_any_process(pipes: Callable[..., PipeQueues]) -> None:
    import pickle

    from parsl.configs.htex_local import config

    doer = ParslTaskServer([f], pipes(), config)
    again = pickle.loads(pickle.dumps(doer))._recipe()
    assert [executor.label for executor in again.executors] == ["htex_local"]
    assert repr(again.executors[0].provider) == repr(config.executors[0].provider)


def test_mistakes_are_named(pipes: Callable[..., PipeQueues]) -> None:
    with pytest.raises(ConfigError, match="two methods are called 'f'"):
        ParslTaskServer([f, (f, {"executors": "all"})], pipes(), lambda: None)
