"""Synchronization nodes. The numbers are those of the acceptance cases they were designed with."""

from __future__ import annotations

import io
import logging
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradientmail_torch.errors import ConfigError, CorruptObject, RunMismatch, RunTimeout, SynchronizationExpired, WorkFailed, WorkFenced
from gradientmail_torch.mailbox import CountingMailbox, Mailbox, open_mailbox
from gradientmail_torch.patterns.synchronization import Call, Invocation, StoredFile, SynchronizationNode, sweep
from gradientmail_torch.testing.clock import ManualClock
from gradientmail_torch.testing.faults import Crash, LostAnswers, nth

Make = Callable[..., SynchronizationNode]
InThreads = Callable[[int, Callable[[int], None]], None]
Data = dict[str, Any]
Deaths = Callable[..., Iterator[tuple[int, bool]]]
THREE = ["shard-0", "shard-1", "shard-2"]


@pytest.fixture
def make(quiet_clock: type[ManualClock]) -> Make:
    """A party with a clock of its own, a lease of 8 s and a look every second, whose heart does not beat unless it ends."""

    def node(box: Mailbox, learner_id: str = "node-0", predecessors: list[str] = THREE, **options: object) -> SynchronizationNode:
        settings: dict[str, Any] = {"name": "evaluate", "lease": 8.0, "clock": quiet_clock(), **options}
        return SynchronizationNode(predecessors=predecessors, mailbox=box, learner_id=learner_id, **settings)

    return node


def total(data: Data, invocation: Invocation) -> float:
    return sum(data.values())


def must_not_run(data: Data, invocation: Invocation) -> None:
    raise AssertionError("ran a second time")


def keys(box: Mailbox, part: str = "") -> list[str]:
    return [key for key in box.list("sync/") if part in key]


# --- running once --------------------------------------------------------------------------------------


def test_01_the_last_to_arrive_runs_it_once_and_all_get_the_result(make: Make, box: Mailbox) -> None:
    parties = [make(box, f"node-{number}") for number in range(3)]
    calls = [party.call(f"shard-{number}", number + 1) for number, party in enumerate(parties)]
    assert calls == [Call(True, False), Call(True, False), Call(True, True)]
    first = parties[2].wait(total)
    assert (first.status, first.value, first.attempt) == ("done", 6, 1)
    for party in parties[:2]:
        assert party.wait(must_not_run, timeout=0) == first
    assert len(keys(box, "/claims/")) == len(keys(box, "/outcomes/")) == 1


def test_01_parties_that_wait_are_woken(box: Mailbox, in_threads: InThreads) -> None:
    results, ran = [], []

    def run(data: Data, invocation: Invocation) -> int:
        ran.append(invocation.attempt)
        return sum(data.values())

    def party(number: int) -> None:
        node = SynchronizationNode("evaluate", THREE, box, f"node-{number}", poll_interval=0.02)
        node.call(f"shard-{number}", number)
        results.append(node.wait(run, timeout=60))

    in_threads(3, party)
    assert ran == [1]
    assert [result.value for result in results] == [3, 3, 3]


def test_02_data_is_a_dict_by_predecessor_in_declared_order(make: Make, box: Mailbox) -> None:
    node = make(box, predecessors=["c", "a", "b"])
    for name in ("b", "c", "a"):
        node.call(name, name.upper())
    assert node.wait(lambda data, invocation: [type(data).__name__, *data.items()]).value == ["dict", ["c", "C"], ["a", "A"], ["b", "B"]]


@pytest.mark.parametrize(
    "payload", [None, {}, [], b"", "", 0, False, b"\x00\xff" * 9000, "ü" * 9000, {"a": [1.5, float("inf"), None]}, list(range(5000))]
)
def test_03_any_payload_arrives_also_equal_ones(payload: object, make: Make, box: Mailbox) -> None:
    node = make(box)
    for name in THREE:
        assert node.call(name, payload).accepted
    seen: list[object] = []
    assert node.wait(lambda data, invocation: seen.append(data) or payload).value == payload
    assert seen == [dict.fromkeys(THREE, payload)]


def test_04_large_payloads_are_written_once(make: Make, box: Mailbox) -> None:
    counting = CountingMailbox(box)
    node = make(counting)
    size = 50_000_000
    for number, name in enumerate(THREE):
        node.call(name, bytes([number]) * size)
    assert node.wait(lambda data, invocation: [len(found) for found in data.values()]).value == [size] * 3
    assert counting.usage.bytes_up <= 3 * size + 10_000
    assert counting.usage.bytes_down <= 3 * size + 10_000


def test_04_files_stream_in_both_directions(make: Make, box: Mailbox, tmp_path: Any) -> None:
    content = bytes(range(256)) * 100_000
    node = make(box, predecessors=["a"])
    file = io.BytesIO(b"skipped" + content)
    file.seek(7)
    node.call("a", file)

    def copy(data: Data, invocation: Invocation) -> object:
        assert isinstance(data["a"], StoredFile)
        assert data["a"].size == len(content)
        data["a"].save(tmp_path / "copy")
        with data["a"].open() as stored:
            stored.seek(-10, io.SEEK_END)
            assert stored.read() == content[-10:]
        return open(tmp_path / "copy", "rb")

    result = node.wait(copy).value
    assert isinstance(result, StoredFile)
    with result.open() as stored:
        assert stored.read() == content


@pytest.mark.parametrize("backend", ["file", pytest.param("s3", marks=pytest.mark.s3)])
def test_04_a_large_file_passes_in_little_memory(backend: str, make: Make, tmp_path: Any, request: pytest.FixtureRequest) -> None:
    """Measured for 1 GiB, by the process's resident memory: 54 MiB over S3, 16 MiB over a directory."""
    size = 160 << 20
    with open(tmp_path / "source", "wb") as source:
        source.truncate(size)
        source.write(b"begin")
    box = open_mailbox(request.getfixturevalue("s3_url") if backend == "s3" else tmp_path / "box")
    node = make(box, predecessors=["a"])
    tracemalloc.start()
    try:
        with open(tmp_path / "source", "rb") as source:
            node.call("a", source)
        result = node.wait(lambda data, invocation: data["a"].save(tmp_path / "copy"))
        extra = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.status == "done"
    assert (tmp_path / "copy").stat().st_size == size
    assert extra <= 64 << 20


@pytest.mark.s3
@pytest.mark.parametrize("size", [8_000, 20_000])
def test_a_fan_in_of_64_over_s3_costs_two_puts_per_predecessor_and_four_for_the_node(size: int, s3_url: str, in_threads: InThreads) -> None:
    names = [f"shard-{number}" for number in range(64)]
    box = CountingMailbox(open_mailbox(s3_url))

    def party(number: int) -> None:
        node = SynchronizationNode("evaluate", names, box, f"node-{number}", poll_interval=3.0)
        node.call(names[number], b"x" * size)
        sums.append(node.wait(lambda data, invocation: sum(map(len, data.values())), timeout=60).value)

    sums: list[Any] = []
    SynchronizationNode("evaluate", names, box, "first")
    in_threads(64, party)
    assert set(sums) == {64 * size}
    assert box.usage.requests["put"] <= 64 * 2 + 4


def test_05_64_last_arrivers_at_once_make_one_invocation(box: Mailbox, in_threads: InThreads) -> None:
    ran, results = [], []
    ready = threading.Barrier(64)

    def run(data: Data, invocation: Invocation) -> str:
        ran.append(invocation)
        return "once"

    def party(number: int) -> None:
        node = SynchronizationNode("evaluate", ["only"], box, f"node-{number}", poll_interval=0.05)
        ready.wait(60)
        node.call("only", number)
        results.append(node.wait(run, timeout=60).value)

    in_threads(64, party)
    assert len(ran) == 1
    assert results == ["once"] * 64
    assert len(keys(box, "/claims/")) == 1


def test_06_repeated_calls_change_nothing(make: Make, box: Mailbox) -> None:
    node = make(box)
    assert node.call("shard-0", 1) == Call(True, False)
    before = keys(box)
    assert make(box, "again").call("shard-0", 100) == Call(False, False)
    assert node.call("shard-0", b"x" * 100_000) == Call(False, False)
    assert node.skip("shard-0") == Call(False, False)
    assert keys(box) == before
    node.call("shard-1", 2)
    node.call("shard-2", 3)
    assert node.wait(total).value == 6
    assert node.call("shard-2", 9) == Call(False, True)
    assert node.wait(must_not_run).value == 6


def test_06_of_two_large_calls_at_the_same_moment_one_stands_and_the_other_leaves_nothing(make: Make, box: Mailbox) -> None:
    class Rival(CountingMailbox):
        """Somebody else's call arrives just before this one's marker."""

        def put_if_absent(self, key: str, body: Any) -> bool:
            if "/reached/" in key:
                make(box, "rival").call("shard-0", b"rival" * 10_000)
            return super().put_if_absent(key, body)

    assert make(Rival(box)).call("shard-0", b"mine" * 10_000) == Call(False, False)
    assert len(keys(box, "/data/")) == 1
    node = make(box)
    for name in THREE:
        node.call(name, b"")
    assert node.wait(lambda data, invocation: data["shard-0"][:5]).value == b"rival"


@pytest.mark.parametrize(("caller", "looks"), [("last", 0), ("first", 0), ("second", 1), ("onlooker", 1)])
def test_who_called_last_or_first_runs_it_at_once_and_the_others_leave_it_to_them_for_a_look(
    caller: str, looks: int, make: Make, box: Mailbox, quiet_clock: type[ManualClock]
) -> None:
    clock = quiet_clock()
    parties = {name: make(box, name, clock=clock) for name in ("first", "second", "last", "onlooker")}
    for name, predecessor in zip(parties, THREE, strict=False):
        parties[name].call(predecessor, 1)
    assert parties[caller].wait(total).value == 3
    assert len(clock.sleeps) == looks


def test_the_last_look_before_a_timeout_runs_it_whoever_comes_first(make: Make, box: Mailbox) -> None:
    for name in THREE:
        make(box, name).call(name, 1)
    assert make(box, "onlooker").wait(total, timeout=0).value == 3


# --- dying ---------------------------------------------------------------------------------------------


def test_07_when_the_last_arriver_dies_after_its_marker_another_runs_it_at_its_next_look(
    make: Make, box: Mailbox, quiet_clock: type[ManualClock]
) -> None:
    clock = quiet_clock()
    waiting, dying = make(box, "waiting", clock=clock), make(box, "dying")
    waiting.call("shard-0", 1)
    waiting.call("shard-1", 2)
    clock.at(10.5, lambda: dying.call("shard-2", 3))
    began = clock.monotonic()
    assert waiting.wait(total).value == 6
    assert clock.monotonic() - began <= 11.0 + 1e-6


def test_08_when_the_runner_dies_inside_the_function_another_takes_over_after_the_lease(
    make: Make, box: Mailbox, quiet_clock: type[ManualClock], killed: Callable[..., Mailbox]
) -> None:
    clock = quiet_clock()
    heir = make(box, "heir", clock=clock)
    for name in THREE:
        heir.call(name, 1)

    def die(data: Data, invocation: Invocation) -> None:
        raise Crash

    dying = make(silenced := Silenced(box), "dying")
    with pytest.raises(Crash):
        dying.wait(lambda data, invocation: silenced.die())
    began = clock.monotonic()
    result = heir.wait(lambda data, invocation: [total(data, invocation), invocation.attempt])
    assert result.value == [3, 2]
    assert 8.0 <= clock.monotonic() - began <= 10.0
    assert len(keys(box, "/outcomes/")) == 1


def test_09_a_party_may_die_before_and_after_each_operation(
    make: Make, box: Mailbox, killed: Callable[..., Mailbox], deaths: Deaths
) -> None:
    large = b"x" * 10_000

    def all_of_it(mailbox: Mailbox, learner_id: str, name: str) -> None:
        node = make(mailbox, learner_id, name=name)
        node.call("shard-0", 1)
        node.skip("shard-1")
        node.call("shard-2", large)
        outcomes.append(node.wait(lambda data, invocation: [list(data), large.decode() * 2]))

    for number, after in deaths():
        outcomes: list[Any] = []
        name = f"{number}-{after}"
        try:
            all_of_it(killed(box, number, after=after), "mortal", name)
            break
        except Crash:
            all_of_it(box, "heir", name)
            all_of_it(box, "late", name)
        assert [outcome.value for outcome in outcomes] == [[["shard-0", "shard-2"], large.decode() * 2]] * 2, name
        assert outcomes[0] == outcomes[1]
        assert len([key for key in keys(box, "/outcomes/") if f"/{name}/" in key]) == 1
    assert number > 15


def test_10_a_lost_answer_to_any_operation_changes_nothing(make: Make, box: Mailbox) -> None:
    number, fired = 0, True
    while fired:
        number += 1
        name = f"run-{number}"
        lossy = LostAnswers(box, nth(number))
        node = make(lossy, name=name)
        assert node.call("shard-0", b"x" * 10_000) == Call(True, False)
        assert node.call("shard-1", 1).accepted
        assert node.skip("shard-2") == Call(True, True)
        assert node.wait(lambda data, invocation: [invocation.attempt, "y" * 10_000]).value == [1, "y" * 10_000]
        fired = bool(lossy.fired)
        mine = [key.split("/")[4] for key in keys(box) if f"/{name}/" in key]
        assert mine == ["claims", "data", "manifest", "outcomes", "reached", "reached", "reached", "results"]
    assert number > 15


def test_11_a_zombie_is_told_and_its_result_is_refused(make: Make, box: Mailbox) -> None:
    zombie, heir = make(box, "zombie"), make(box, "heir")
    for name in THREE:
        heir.call(name, 1)

    def oversleep(data: Data, invocation: Invocation) -> str:
        assert not invocation.is_fenced()
        assert heir.wait(lambda data, invocation: "heir's").attempt == 2
        assert invocation.is_fenced()
        return "z" * 10_000

    with pytest.raises(WorkFenced, match=r"attempt 1 .* attempt 2 of heir-"):
        zombie.wait(oversleep)
    assert zombie.wait(must_not_run).value == "heir's"
    assert keys(box, "/results/") == []


# --- skipping, triggers, failing -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "skipped", "status"),
    [
        *[(trigger, 0, "done") for trigger in ("any_called", "all_called", "all_reached")],
        ("any_called", 1, "done"),
        ("all_called", 1, "skipped"),
        ("all_reached", 1, "done"),
        ("any_called", 3, "skipped"),
        ("all_called", 3, "skipped"),
        ("all_reached", 3, "done"),
    ],
)
@pytest.mark.parametrize("with_function", [True, False])
def test_13_each_trigger_with_none_one_and_all_skipped(
    trigger: str, skipped: int, status: str, with_function: bool, make: Make, box: Mailbox
) -> None:
    node = make(box, trigger=trigger)
    for number, name in enumerate(THREE):
        _ = node.skip(name) if number < skipped else node.call(name, number)
    if not with_function and status == "done":
        with pytest.raises(RunTimeout, match="nobody here has its function"):
            node.wait(timeout=3)
        return
    result = node.wait((lambda data, invocation: [list(data), invocation.skipped]) if with_function else None)
    assert result.status == status
    assert result.value == ([THREE[skipped:], THREE[:skipped]] if status == "done" else None)


def test_a_function_that_raises_fails_the_node_for_everyone_with_its_traceback(make: Make, box: Mailbox) -> None:
    parties = [make(box, f"node-{number}") for number in range(3)]
    for party, name in zip(parties, THREE, strict=True):
        party.call(name)

    def broken(data: Data, invocation: Invocation) -> None:
        raise ValueError("no such metric: f1")

    for party in parties:
        with pytest.raises(WorkFailed, match=r"node 'evaluate' .* failed(.|\n)*def broken|in broken(.|\n)*no such metric: f1"):
            party.wait(broken)
    assert len(keys(box, "/claims/")) == 1


def test_an_error_that_names_a_file_which_is_no_text_fails_the_node(make: Make, box: Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    def broken(data: Data, invocation: Invocation) -> None:
        raise FileNotFoundError("no file '\udcff'")

    node = make(box, predecessors=["a"])
    node.call("a")
    with caplog.at_level(logging.CRITICAL), pytest.raises(WorkFailed, match=r"no file '\\udcff'"):
        node.wait(broken)


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {1, 2}}, io.StringIO("text"), io.StringIO()])
def test_a_result_that_cannot_travel_fails_the_node(value: object, make: Make, box: Mailbox) -> None:
    node = make(box, predecessors=["a"])
    node.call("a")
    with pytest.raises(WorkFailed, match="what the function of 'evaluate' returned"):
        node.wait(lambda data, invocation: value)
    assert keys(box, "/results/") == []


@pytest.mark.parametrize("payload", [object(), {1: 2}, {"a": {1, 2}}, io.StringIO("text"), io.StringIO(), "\ud800"])
def test_a_payload_that_cannot_travel_is_refused_and_nothing_is_recorded(payload: object, make: Make, box: Mailbox) -> None:
    node = make(box)
    before = keys(box)
    with pytest.raises(ConfigError, match="the payload of 'shard-0' for 'evaluate'"):
        node.call("shard-0", payload)
    assert keys(box) == before
    assert node.call("shard-0", "better").accepted


def test_an_interrupted_function_is_run_again_by_the_next_party_without_waiting_for_the_lease(make: Make, box: Mailbox) -> None:
    a, b = make(box, "a"), make(box, "b")
    for name in THREE:
        a.call(name, 1)

    def interrupted(data: Data, invocation: Invocation) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        a.wait(interrupted)
    assert b.wait(total, timeout=0).attempt == 2


def test_a_node_whose_every_runner_dies_is_given_up(make: Make, box: Mailbox) -> None:
    make(box).call("shard-0")
    make(box).call("shard-1")
    make(box).call("shard-2")
    for number in (1, 2):
        dying = make(silenced := Silenced(box), f"dying-{number}", max_attempts=2)
        with pytest.raises(Crash):
            dying.wait(lambda data, invocation: silenced.die())
    with pytest.raises(WorkFailed, match="abandoned: 2 attempts were made"):
        make(box, "last", max_attempts=2).wait(must_not_run)


# --- waiting -------------------------------------------------------------------------------------------


def test_15_a_wait_that_timed_out_can_be_resumed(make: Make, box: Mailbox) -> None:
    node = make(box)
    node.call("shard-1", 1)
    with pytest.raises(TimeoutError, match=r"node 'evaluate' .* waits for shard-0, shard-2 after 5 s"):
        node.wait(total, timeout=5)
    node.call("shard-0", 1)
    node.call("shard-2", 1)
    assert node.wait(total, timeout=5).value == 3
    assert make(box, "late").wait(timeout=0).value == 3


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_is_no_duration_is_refused(timeout: float, make: Make, box: Mailbox) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        make(box).wait(timeout=timeout)


# --- sweeping ------------------------------------------------------------------------------------------


def test_16_what_has_been_at_rest_is_swept_and_who_comes_late_is_told(make: Make, box: Mailbox, quiet_clock: type[ManualClock]) -> None:
    clock = quiet_clock()
    node = make(box)
    node.call("shard-0", b"x" * 10_000)
    assert sweep(box, "janitor", ttl=100, clock=clock) == []
    clock.advance(60)
    assert sweep(box, "janitor", ttl=100, clock=clock) == []
    node.call("shard-1", 1)
    clock.advance(60)
    assert sweep(box, "janitor", ttl=100, clock=clock) == [], "shard-1 arrived meanwhile"
    assert sweep(box, "another", ttl=100, clock=clock) == [], "it has only now begun to look"
    clock.advance(101)
    assert sweep(box, "janitor", ttl=100, clock=clock) == ["sync/run/node/evaluate/"]
    assert keys(box) == ["sync/run/node/evaluate/expired"]
    with pytest.raises(SynchronizationExpired, match="use a new run_id"):
        node.call("shard-2", b"y" * 10_000)
    with pytest.raises(SynchronizationExpired):
        node.wait(total)
    with pytest.raises(SynchronizationExpired):
        make(box, "new")
    sweep(box, "janitor", ttl=100, clock=clock)
    assert keys(box) == ["sync/run/node/evaluate/expired"], "what the late call left is swept too"
    assert make(box, run_id="next").call("shard-0").accepted


def test_16_a_live_claim_is_kept(make: Make, box: Mailbox, quiet_clock: type[ManualClock]) -> None:
    clock = quiet_clock()
    node = make(box, predecessors=["a"])
    node.call("a", 1)

    def long(data: Data, invocation: Invocation) -> str:
        assert len(keys(box, "/claims/")) == 1
        for beat in range(5):
            box.put("sync/run/node/evaluate/beats/x", b"%d" % beat)
            clock.advance(90)
            assert sweep(box, "janitor", ttl=100, clock=clock) == []
        return "done"

    assert node.wait(long).value == "done"


def test_16_a_result_that_comes_after_the_sweep_is_not_taken_for_committed(
    make: Make, box: Mailbox, quiet_clock: type[ManualClock]
) -> None:
    clock = quiet_clock()
    node = make(box, predecessors=["a"])
    node.call("a", 1)

    def overslept(data: Data, invocation: Invocation) -> str:
        sweep(box, "janitor", ttl=100, clock=clock)
        clock.advance(101)
        assert sweep(box, "janitor", ttl=100, clock=clock)
        return "too late"

    with pytest.raises(SynchronizationExpired):
        node.wait(overslept)


@pytest.mark.parametrize("options", [{"ttl": -1}, {"ttl": 0}, {"ttl": 10, "lease": 60}, {"ttl": float("nan")}, {"learner_id": ""}])
def test_16_a_sweep_that_could_hit_the_living_is_refused(options: Any, box: Mailbox) -> None:
    with pytest.raises(ConfigError):
        sweep(box, **{"learner_id": "janitor", **options})


# --- bad input -----------------------------------------------------------------------------------------


def test_17_another_definition_under_the_same_name_is_refused(make: Make, box: Mailbox) -> None:
    make(box)
    before = keys(box)
    with pytest.raises(RunMismatch, match="node 'evaluate' has predecessors a here and predecessors shard-0, shard-1, shard-2 there"):
        make(box, predecessors=["a"])
    with pytest.raises(RunMismatch, match="begun with other nodes"):
        make(box, predecessors=[*reversed(THREE)])
    with pytest.raises(RunMismatch, match="trigger 'all_called' here and 'any_called' there"):
        make(box, trigger="all_called")
    assert keys(box) == before


@pytest.mark.parametrize("predecessors", [[], [""], ["a", "a"], "abc", ["evaluate"], ["<start>"], ["\ud800"], ["x" * 300]])
def test_17_predecessors_that_cannot_be_are_refused(predecessors: Any, make: Make, box: Mailbox) -> None:
    with pytest.raises(ConfigError):
        make(box, predecessors=predecessors)
    assert keys(box) == []


def test_17_an_unknown_predecessor_is_refused(make: Make, box: Mailbox) -> None:
    node = make(box)
    before = keys(box)
    for act in (node.call, node.skip):
        with pytest.raises(ConfigError, match="'shard-9' is not a predecessor of 'evaluate': they are 'shard-0', 'shard-1', 'shard-2'"):
            act("shard-9")
    assert keys(box) == before


@pytest.mark.parametrize(
    "options",
    [
        {"poll_interval": 0},
        {"poll_interval": 3.0},
        {"lease": -1},
        {"learner_id": "a b"},
        {"trigger": "never"},
        {"name": ""},
        {"run_id": ""},
    ],
)
def test_settings_that_cannot_work_are_refused(options: Any, make: Make, box: Mailbox) -> None:
    with pytest.raises(ConfigError):
        make(box, **options)
    assert keys(box) == []


def test_18_1500_predecessors(make: Make, box: Mailbox) -> None:
    names = [f"shard {number}" for number in range(1500)]
    node = make(box, predecessors=names)
    for number, name in enumerate(reversed(names)):
        call = node.call(name, number)
        assert call.accepted
        assert call.complete == (number == 1499)
    assert node.wait(lambda data, invocation: [list(data) == names, sum(data.values())]).value == [True, 1499 * 750]


def test_19_names_may_be_any_text(make: Make, box: Mailbox) -> None:
    names = ["a/b", "a b", "ä", "日本", "a%2Fb", ".", "..", "-", "a\nb", "<a>", "x" * 190]
    node = make(box, name="ev/al ü", run_id="r/7 %", predecessors=names)
    for name in names:
        node.call(name, name)
    assert make(box, "other", name="ev/al ü", run_id="r/7 %", predecessors=names).wait(lambda data, invocation: data).value == {
        name: name for name in names
    }


def test_altered_payloads_are_noticed(make: Make, box: Mailbox) -> None:
    node = make(box, predecessors=["a"])
    node.call("a", b"x" * 10_000)
    (key,) = keys(box, "/data/")
    box.put(key, b"y" * 10_000)
    with pytest.raises(CorruptObject, match="length or digest differs"):
        node.wait(must_not_run)


# --- helpers -------------------------------------------------------------------------------------------


class Silenced(CountingMailbox):
    """A process's way to the mailbox, which ends with the process."""

    dead = False

    def die(self) -> None:
        self.dead = True
        raise Crash

    def put(self, key: str, body: Any) -> None:
        if self.dead:
            raise Crash
        super().put(key, body)
