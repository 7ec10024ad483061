"""A Result has Colmena's form, in strict JSON, and says where the time went."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from colmena.models import Result as ColmenaResult

from gradientmail_torch.errors import ConfigError, CorruptObject
from gradientmail_torch.patterns.steering import FailureInformation, Result
from gradientmail_torch.patterns.steering.result import MARKS, TimeSpans, Timestamps
from gradientmail_torch.patterns.steering.wire import dump, load, pack, result_from_json, unpack


def no_reference(_: Any) -> Any:
    raise AssertionError("the message refers to nothing")


def finished(**fields: Any) -> Result:
    result = Result.from_args_and_kwargs([1, 1], {"operator": "add"}, method="reduce", topic="default", **fields)
    for step in MARKS:
        result.mark(step)
    result.set_result(2, 0.5)
    return result


def strictly(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_arguments_can_be_had_by_place_and_by_name() -> None:
    result = finished()
    assert result.args == (1, 1)
    assert result.kwargs == {"operator": "add"}


def test_json_is_strict_and_leaves_out_what_is_not_set() -> None:
    content = strictly(Result(((1,), {}), method="f").json())
    assert content["inputs"] == [[1], {}]
    assert list(content["timestamp"]) == ["created"]
    assert content["time"] == {"additional": {}}
    assert not {"value", "success", "failure_info", "worker_info"} & content.keys()


def test_a_log_of_results_can_be_read_again() -> None:
    result = finished()
    again = result_from_json(result.json())
    assert again.overhead() == result.overhead()
    assert (again.args, again.kwargs, again.value) == ((1, 1), {"operator": "add"}, 2)


def test_json_can_leave_fields_out_and_writes_null_for_what_json_lacks() -> None:
    result = finished()
    result.value = {"loss": math.nan, "best": [math.inf]}
    assert strictly(result.json())["value"] == {"loss": None, "best": [None]}
    assert "value" not in strictly(result.json(exclude={"value"}))


@pytest.mark.parametrize("method", ["json", "pickle"])
@pytest.mark.parametrize("serialized", [False, True])
def test_colmena_reads_our_json(method: Any, serialized: bool) -> None:
    result = finished(serialization_method=method, task_info={"id": 7}, max_retries=2)
    if serialized:
        result.serialize()
    theirs = ColmenaResult.model_validate_json(result.json())
    if serialized:
        theirs.deserialize()
    assert (theirs.args, theirs.kwargs, theirs.value) == ((1, 1), {"operator": "add"}, 2)
    assert theirs.task_id == result.task_id
    assert theirs.task_info == {"id": 7}
    assert theirs.timestamp.result_received == result.timestamp.result_received
    assert theirs.time.running == 0.5


@pytest.mark.parametrize("method", ["json", "pickle"])
def test_we_read_the_json_of_colmena(method: Any) -> None:
    theirs = ColmenaResult.from_args_and_kwargs((1, "a"), {"b": [2]}, method="f", serialization_method=method, topic="t")
    theirs.set_result({"x": 1.5}, 0.25)
    theirs.serialize()
    ours = load(theirs.json(), no_reference, allow_pickle=True)  # its marks that are not set are NaN
    ours.deserialize()
    assert (ours.args, ours.kwargs, ours.value) == ((1, "a"), {"b": [2]}, {"x": 1.5})
    assert ours.timestamp.result_received is None
    assert ours.time.running == 0.25


def test_the_example_of_the_guide_is_read() -> None:
    page = """{
        "inputs": [[1, 1], {"operator": "add"}], "serialization_method": "pickle", "method": "reduce", "value": 2, "success": true,
        "timestamps": {"created": 1593498015.132477, "input_received": 1593498015.13357, "compute_started": 1593498018.856764,
                       "result_sent": 1593498018.858268, "result_received": 1593498018.860002},
        "time": {"running": 1.8e-05, "serialize_inputs": 4.07e-05, "deserialize_inputs": 4.28e-05,
                 "serialize_results": 3.32e-05, "deserialize_results": 3.30e-05}}"""
    result = result_from_json(page)
    assert (result.args, result.kwargs, result.value) == ((1, 1), {"operator": "add"}, 2)
    assert result.timestamp.created == 1593498015.132477
    assert result.overhead().efficiency == pytest.approx(1.8e-05 / 3.727525, rel=1e-3)


@pytest.mark.parametrize("through", ["one block", "JSON"])
def test_every_field_survives_the_way(through: str) -> None:
    result = finished(task_info={"a": [1]}, max_retries=3, retries=1, keep_inputs=True)
    result.failure_info = FailureInformation(exception="E", traceback="T")
    result.serialize()
    if through == "one block":
        found = unpack(pack(result), allow_pickle=False)
    else:
        found = load(dump(result, lambda payload: payload.text()), no_reference, allow_pickle=False)
    assert found == result


def test_a_pickled_value_is_refused_unless_the_reader_takes_it() -> None:
    result = finished(serialization_method="pickle")
    result.serialize()
    with pytest.raises(CorruptObject, match="serialization_method='json'"):
        unpack(pack(result), allow_pickle=False)
    with pytest.raises(CorruptObject, match="does not take pickled values"):
        load(result.json(), no_reference, allow_pickle=False)


def test_a_pickle_that_hides_behind_another_method_is_refused() -> None:
    result = finished(serialization_method="pickle")
    result.serialize()
    result.serialization_method = "json"
    with pytest.raises(CorruptObject, match="does not take pickled values"):
        unpack(pack(result), allow_pickle=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"inputs": 3}',
        '{"inputs": [[], {}], "serialization_method": "eval"}',
        '{"inputs": [[], {}], "task_id": "../../x"}',
        '{"inputs": [[], {}], "retries": "many"}',
        '{"inputs": [[], {}], "timestamp": 3}',
        '{"inputs": [[], {}], "resources": {"node_count": "all"}}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:60],
)
def test_what_is_not_a_task_message_is_a_corrupt_object(text: str) -> None:
    with pytest.raises(CorruptObject):
        load(text, no_reference, allow_pickle=True)


def test_a_message_refers_to_nothing_that_it_does_not_hold() -> None:
    result = finished()
    result.serialize()
    with pytest.raises(CorruptObject):
        unpack(pack(result)[:-20], allow_pickle=False)


def test_what_went_wrong_arrives_whatever_the_error_says_of_itself() -> None:
    class Speechless(Exception):
        def __repr__(self) -> str:
            raise RuntimeError

    for error, text in ((FileNotFoundError("no file '\udcff'"), "no file"), (Speechless(), "Speechless, which cannot say")):
        failed = Result(((), {}), method="f")
        failed.set_failure(FailureInformation.from_exception(error))
        found = unpack(pack(failed), allow_pickle=False)
        assert text in found.failure_info.exception
        assert type(error).__name__ in found.failure_info.traceback


def test_an_unknown_mark_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown mark 'beginning'"):
        finished().mark("beginning")


# --- overhead ---------------------------------------------------------------------------------------------

TRUE_TIMES = dict(zip(MARKS, (0.0, 1.5, 1.6, 2.6, 7.6, 8.1, 8.2, 9.0), strict=True))
SPANS = TimeSpans(running=4.5, serialize_inputs=0.1, deserialize_inputs=0.2, serialize_results=0.15, deserialize_results=0.05)


def taken(*, server_skew: float = 0.0, worker_skew: float = 0.0) -> Result:
    """A task whose machines' clocks are wrong by so many seconds."""
    skew = dict.fromkeys(("input_received", "start_task_submission", "task_received", "result_sent"), server_skew)
    skew |= dict.fromkeys(("compute_started", "compute_ended"), worker_skew)
    marks = Timestamps(**{name: 1e9 + at + skew.get(name, 0.0) for name, at in TRUE_TIMES.items()})
    return Result(((), {}), timestamp=marks, time=replace(SPANS))


def test_the_parts_of_the_overhead_add_up() -> None:
    found = taken().overhead()
    parts = (found.queues_s, found.server_s, found.engine_s, found.serialization_s, found.running_s, found.worker_s)
    assert sum(part for part in parts if part is not None) == pytest.approx(found.total_s)
    assert parts == pytest.approx((2.15, 0.2, 1.35, 0.5, 4.5, 0.3))
    assert found.efficiency == pytest.approx(0.5)


@pytest.mark.parametrize("hour", [-3600.0, 3600.0])
def test_clocks_that_are_an_hour_wrong_move_no_part_but_the_single_ways(hour: float) -> None:
    right, wrong = taken().overhead(), taken(server_skew=hour, worker_skew=-2 * hour).overhead()
    for name in ("total_s", "queues_s", "server_s", "engine_s", "serialization_s", "running_s", "worker_s"):
        assert getattr(wrong, name) == pytest.approx(getattr(right, name), abs=1e-5), name
    assert wrong.one_way.to_server_s == pytest.approx(1.5 + hour)
    assert wrong.one_way.to_worker_s == pytest.approx(1.0 - 3 * hour)


def test_a_part_whose_marks_are_missing_is_unknown() -> None:
    found = Result(((), {})).overhead()
    assert found.total_s is None
    assert found.queues_s is None
    assert found.efficiency is None
