"""A run's figures for Prometheus, which comes and takes them (extra ``[metrics]``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from gradientmail_torch.errors import ConfigError
from gradientmail_torch.lightning.companion import companion_of
from gradientmail_torch.session import Stats

if TYPE_CHECKING:
    from prometheus_client import Metric

_GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "round": ("Newest version that this node has adopted, of any fragment.", lambda stats: max(stats.versions, default=0)),
    "learners": ("Live learners in training, this one included.", lambda stats: stats.learners),
    "staleness_steps": ("Own steps on the oldest base that has something newer on its way.", lambda stats: stats.staleness_steps),
    "seconds_per_step": ("Time of an optimizer step.", lambda stats: stats.seconds_per_step),
}
_COUNTERS: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "steps": ("Optimizer steps.", lambda stats: stats.steps),
    "samples": ("Samples trained on.", lambda stats: stats.samples),
    "contributed": ("Contributions of this node that are in a commit.", lambda stats: stats.tally.merged),
    "discarded_steps": ("Own steps that are in no commit and never will be.", lambda stats: stats.tally.discarded_work.steps),
    "stall_seconds": ("Time that the training thread has lost to the session.", lambda stats: stats.stall_seconds),
    "bytes_up": ("To the mailbox.", lambda stats: stats.usage.bytes_up),
    "bytes_down": ("From the mailbox.", lambda stats: stats.usage.bytes_down),
}


class StatsCollector:
    """What a Prometheus registry asks for the figures of a session: ``REGISTRY.register(StatsCollector(session.stats))``.

    Each is ``gradientmail_NAME`` with the label ``learner_id``; counters end in ``_total``. ``stats`` gives None while
    there is no session.
    """

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._stats = stats
        require()

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = self._stats()
        if stats is None:
            return
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (text, value) in table.items():
                family: Any = kind(f"gradientmail_{name}", text, labels=["learner_id"])
                family.add_metric([stats.learner_id], value(stats))
                yield family
        requests = CounterMetricFamily("gradientmail_requests", "To the mailbox, by operation.", labels=["learner_id", "operation"])
        for operation, number in stats.usage.requests.items():
            requests.add_metric([stats.learner_id, operation], number)
        yield requests


class PrometheusEndpoint(Callback):
    """Serves the session's figures at ``http://address:port/metrics`` for the time of a ``fit``.

    One process of a node serves, its rank 0. See :class:`StatsCollector` for what is served. Needs the extra
    ``gradientmail-torch[metrics]``.

    Args:
        port: 0 takes any that is free, which :attr:`port` then says.
        address: of the interface that is listened on; ``0.0.0.0`` lets other machines ask.
    """

    def __init__(self, port: int = 9464, address: str = "127.0.0.1") -> None:
        require()
        self._wanted = port
        self._address = address
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int | None:
        """That which is served at; None while nothing is."""
        return self._server.server_port if self._server is not None else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        companion = companion_of(trainer)
        if companion is None or not trainer.is_global_zero:
            return
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(StatsCollector(lambda: companion.stats))
        try:
            self._server, self._thread = start_http_server(self._wanted, self._address, registry)
        except OSError as error:
            raise ConfigError(
                f"the figures cannot be served at {self._address}:{self._wanted}: {error}. Give the node's processes ports of their own"
            ) from error

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is not None and thread is not None:
            server.shutdown()
            server.server_close()
            thread.join()


def require() -> None:
    """Raises :class:`ConfigError` where Prometheus's library is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("figures for Prometheus need prometheus_client: pip install 'gradientmail-torch[metrics]'") from error
