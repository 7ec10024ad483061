"""The objects of a steering queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gradientmail_torch.errors import InvalidName
from gradientmail_torch.keys.names import decode_name, encode_name, number, parse_number
from gradientmail_torch.keys.patterns import WorkKeys

_TASK_SEPARATOR = "."


@dataclass(frozen=True, slots=True)
class TaskKeys(WorkKeys):
    """The keys of a steering queue. A work item is a task: ``{created}-{task_id}.{topic}``, so that items sort by age."""

    @staticmethod
    def of(name: str) -> TaskKeys:
        return TaskKeys(f"steering/{encode_name(name, what='queue name')}/")

    def item(self, created_ms: int, task_id: str, topic: str) -> str:
        found = f"{number(created_ms, 15)}-{task_id}{_TASK_SEPARATOR}{topic}"
        encode_name(found, what="task ID and topic together")  # refused here, before anything is sent
        return found

    def request(self, method: str, item: str) -> str:
        return self.requests(method) + encode_name(item)

    def requests(self, method: str | None = None) -> str:
        return f"{self.root}requests/" if method is None else f"{self.root}requests/{encode_name(method, what='method')}/"

    def outcome(self, item: str) -> str:
        stem, topic = item.split(_TASK_SEPARATOR, 1)
        return self.results(topic) + encode_name(stem)

    def part(self, item: str, attempt: int, place: int) -> str:
        """An intermediate result, written by one attempt only; sorts behind the outcome."""
        return f"{self.outcome(item)}{_TASK_SEPARATOR}{number(attempt, 6)}{_TASK_SEPARATOR}{number(place, 6)}"

    def results(self, topic: str | None = None) -> str:
        """Prefix of a topic's results, or of all."""
        return f"{self.root}results/" if topic is None else f"{self.root}results/{encode_name(topic, what='topic')}/"

    def claims_from(self, item: str) -> str:
        """What sorts just before the claims of ``item`` and of younger ones."""
        return self.claims(item)[:-1]

    def results_from(self, item: str) -> str:
        """What sorts just before the results of ``item`` and of younger ones."""
        return self.outcome(item)[:-1]

    def data(self, item: str, nonce: str, place: int) -> str:
        """A large value, written by one party only."""
        return f"{self.data_of(item)}{nonce}-{place}"

    def data_of(self, item: str) -> str:
        return f"{self.all_data()}{encode_name(item)}/"

    def all_data(self) -> str:
        return f"{self.root}data/"

    def server(self, learner_id: str) -> str:
        return self.servers() + encode_name(learner_id, what="learner_id")

    def servers(self) -> str:
        return f"{self.root}servers/"

    def stop(self) -> str:
        return f"{self.root}stop"


class RequestKey(NamedTuple):
    method: str
    item: str
    task_id: str
    topic: str


def parse_request(key: str) -> RequestKey:
    """What a key below ``requests/`` of :class:`TaskKeys` is about; raises :class:`InvalidName`."""
    try:
        _, method, segment = key.rsplit("/", 2)
        item = decode_name(segment)
        stem, topic = item.split(_TASK_SEPARATOR, 1)
        created, task_id = stem.split("-", 1)
        parse_number(created, 15)
        return RequestKey(decode_name(method), item, task_id, topic)
    except ValueError:
        raise InvalidName(f"{key!r} is not the key of a task") from None


class ResultKey(NamedTuple):
    item: str
    part: tuple[int, int] | None
    """Attempt and place of an intermediate result; None for the outcome."""


def parse_result(key: str) -> ResultKey:
    """What a key below ``results/`` of :class:`TaskKeys` is about; raises :class:`InvalidName`."""
    try:
        _, topic, segment = key.rsplit("/", 2)
        stem, *part = segment.split(_TASK_SEPARATOR)
        attempt, place = part or (None, None)
        return ResultKey(
            decode_name(stem) + _TASK_SEPARATOR + decode_name(topic),
            (parse_number(attempt, 6), parse_number(place, 6)) if attempt is not None and place is not None else None,
        )
    except ValueError:
        raise InvalidName(f"{key!r} is not the key of a result") from None
