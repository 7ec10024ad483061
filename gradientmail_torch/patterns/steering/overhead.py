"""Where the time between a request and its result went.

Three machines take part: the Thinker's, the server's, the worker's, and their clocks need not agree. So a part is
always the difference of two intervals, each taken on one machine: what the Thinker waited less what the server
had it is what the queues took, both ways together. How that splits into there and back depends on the clocks; those
figures are kept apart, in :class:`OneWay`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class _Timestamps(Protocol):
    created: float
    input_received: float | None
    start_task_submission: float | None
    compute_started: float | None
    compute_ended: float | None
    task_received: float | None
    result_sent: float | None
    result_received: float | None


class _TimeSpans(Protocol):
    running: float | None
    serialize_inputs: float | None
    deserialize_inputs: float | None
    serialize_results: float | None
    deserialize_results: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneWay:
    """Seconds on single ways. **These contain the skew between two machines' clocks**; None where a mark is missing."""

    to_server_s: float | None
    to_worker_s: float | None
    from_worker_s: float | None
    to_thinker_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Parts of a task's time in seconds; they add up to ``total_s``. None where a mark is missing."""

    total_s: float | None
    """From request to result, by the Thinker's clock."""
    queues_s: float | None
    """Both ways between Thinker and server, waiting included, serialization not."""
    server_s: float | None
    """In the server, outside its engine."""
    engine_s: float | None
    """Both ways between server and worker, waiting included, serialization not."""
    serialization_s: float | None
    """Writing and reading inputs and value."""
    running_s: float | None
    """The function itself."""
    worker_s: float | None
    """In the worker, beside the function and serialization."""
    one_way: OneWay

    @property
    def efficiency(self) -> float | None:
        """Share of the time in which the function ran."""
        if self.running_s is None or not self.total_s:
            return None
        return self.running_s / self.total_s


def overhead(marks: _Timestamps, spans: _TimeSpans) -> Overhead:
    total = _less(marks.result_received, marks.created)
    served = _less(marks.result_sent, marks.input_received)
    engaged = _less(marks.task_received, marks.start_task_submission)
    computed = _less(marks.compute_ended, marks.compute_started)
    at_thinker = (spans.serialize_inputs or 0.0) + (spans.deserialize_results or 0.0)
    serializing = at_thinker + (spans.deserialize_inputs or 0.0) + (spans.serialize_results or 0.0)
    return Overhead(
        total_s=total,
        queues_s=_less(_less(total, served), at_thinker),
        server_s=_less(served, engaged),
        engine_s=_less(_less(engaged, computed), spans.serialize_results or 0.0),
        serialization_s=serializing,
        running_s=spans.running,
        worker_s=_less(_less(computed, spans.running), spans.deserialize_inputs or 0.0),
        one_way=OneWay(
            to_server_s=_less(marks.input_received, marks.created),
            to_worker_s=_less(marks.compute_started, marks.start_task_submission),
            from_worker_s=_less(marks.task_received, marks.compute_ended),
            to_thinker_s=_less(marks.result_received, marks.result_sent),
        ),
    )


def _less(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else later - earlier
