"""Workflows: payloads, skips and failures travel down; any party may die anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradientmail_torch.errors import ConfigError, RunMismatch, RunTimeout, WorkFailed
from gradientmail_torch.mailbox import CountingMailbox, Mailbox, PrefixedMailbox
from gradientmail_torch.patterns.synchronization import Call, Invocation, Workflow
from gradientmail_torch.testing.clock import ManualClock
from gradientmail_torch.testing.faults import Crash, LostAnswers, nth

Make = Callable[..., Workflow]
Data = dict[str, Any]
Deaths = Callable[..., Iterator[tuple[int, bool]]]
DIAMOND = {"plan": ["train", "probe"], "train": ["evaluate"], "probe": ["evaluate"], "evaluate": ["report"]}


@pytest.fixture
def make(quiet_clock: type[ManualClock]) -> Make:
    """A party with a clock of its own, a lease of 8 s and a look every second, whose heart does not beat unless it ends."""

    def workflow(box: Mailbox, learner_id: str = "node-0", edges: dict[str, list[str]] = DIAMOND, **options: object) -> Workflow:
        settings: dict[str, Any] = {"lease": 8.0, "clock": quiet_clock(), **options}
        return Workflow(edges, box, learner_id, **settings)

    return workflow


def trace(data: Data, invocation: Invocation) -> Data:
    """What ran below what."""
    return {invocation.node: data}


ALL = dict.fromkeys(["plan", "train", "probe", "evaluate", "report"], trace)


def outcomes(box: Mailbox) -> list[str]:
    return [key.rpartition("/")[2] for key in box.list("sync/") if "/outcomes/" in key]


# --- running -------------------------------------------------------------------------------------------


def test_what_a_node_returns_goes_to_its_successors(make: Make, box: Mailbox) -> None:
    workflow = make(box, functions=ALL)
    assert workflow.invoke("plan", 7) == Call(True, True)
    results = workflow.run(timeout=60)
    plan = {"plan": {"<start>": 7}}
    evaluate = {"evaluate": {"train": {"train": {"plan": plan}}, "probe": {"probe": {"plan": plan}}}}
    assert {name: result.value for name, result in results.items()} == {"report": {"report": {"evaluate": evaluate}}}
    assert make(box, "late").wait("evaluate", timeout=0).value == evaluate


def test_a_caller_of_its_own_invokes_successors_by_its_name(make: Make, box: Mailbox) -> None:
    workflow = make(box)
    assert workflow.invoke("train", 1, by="plan") == Call(True, True)
    assert workflow.invoke("probe", 2, by="plan") == Call(True, True)
    assert workflow.wait("train", lambda data, invocation: data["plan"] * 10).value == 10
    assert workflow.wait("probe", lambda data, invocation: data["plan"] * 10).value == 20
    assert workflow.wait("evaluate", lambda data, invocation: data).value == {"train": 10, "probe": 20}


def test_a_function_may_call_and_skip_its_successors_itself(make: Make, box: Mailbox) -> None:
    def plan(data: Data, invocation: Invocation) -> str:
        assert invocation.invoke("probe", conditional=False) == Call(True, True)
        return "to train"

    workflow = make(box, functions={**ALL, "plan": plan})
    workflow.invoke("plan")
    results = workflow.run(timeout=60)
    assert results["report"].value == {"report": {"evaluate": {"evaluate": {"train": {"train": {"plan": "to train"}}}}}}
    assert workflow.wait("probe").status == "skipped"


def test_resume_runs_what_is_complete_and_returns_it(make: Make, box: Mailbox) -> None:
    workflow = make(box, functions=ALL)
    assert workflow.resume() == []
    workflow.invoke("train", 1, by="plan")
    assert make(box, "other", functions=ALL).resume() == ["train"]
    assert workflow.resume() == []
    workflow.invoke("probe", 1, by="plan")
    assert workflow.resume() == ["probe", "evaluate", "report"]


def test_several_machines_share_the_nodes(make: Make, box: Mailbox) -> None:
    trainers = make(box, "trainer", functions={"plan": trace, "train": trace, "probe": trace})
    evaluator = make(box, "evaluator", functions={"evaluate": trace, "report": trace})
    trainers.invoke("plan")
    assert trainers.resume() == ["plan", "train", "probe"] or trainers.resume() == []
    assert evaluator.resume() == ["evaluate", "report"]
    assert trainers.run(timeout=0) == evaluator.run(timeout=0)


def test_results_are_named_not_copied(make: Make, box: Mailbox) -> None:
    counting = CountingMailbox(box)
    workflow = make(counting, edges={"a": ["b", "c", "d"]}, functions={"a": lambda data, invocation: b"x" * 1_000_000})
    workflow.invoke("a")
    assert workflow.resume() == ["a"]
    assert workflow.wait("c", lambda data, invocation: len(data["a"])).value == 1_000_000
    assert counting.usage.bytes_up < 1_010_000


# --- skipping and failing ------------------------------------------------------------------------------


def test_14_a_skip_travels_to_every_node_below(make: Make, box: Mailbox) -> None:
    chain = {"a": ["b", "x"], "b": ["c"], "c": ["d"], "d": ["meet"], "x": ["meet"], "meet": ["end"]}
    workflow = make(box, edges=chain)
    assert workflow.invoke("b", by="a", conditional=False) == Call(True, True)
    assert outcomes(box) == ["b", "c", "d"]
    workflow.invoke("x", 1, by="a")
    assert workflow.wait("x", trace).value == {"x": {"a": 1}}
    assert workflow.wait("meet", lambda data, invocation: [data, invocation.skipped]).value == [{"x": {"x": {"a": 1}}}, ["d"]]


def test_14_a_skip_reaches_both_synchronization_nodes_behind_it(make: Make, box: Mailbox) -> None:
    edges = {"a": ["left", "right"], "b": ["left", "right"], "c": ["right", "left"]}
    workflow = make(box, edges=edges, functions={"left": trace, "right": trace})
    workflow.invoke("a", by=None, conditional=False)
    workflow.invoke("b", 2)
    workflow.invoke("c", 3)
    for name in "bc":
        workflow.wait(name, lambda data, invocation: invocation.node)
    results = workflow.run(timeout=60)
    assert results["left"].value == {"left": {"b": "b", "c": "c"}}
    assert results["right"].value == {"right": {"b": "b", "c": "c"}}


def test_14_a_nested_node_whose_first_input_was_wholly_skipped_runs(make: Make, box: Mailbox) -> None:
    edges = {"s": ["a", "b", "c"], "a": ["inner"], "b": ["inner"], "inner": ["outer"], "c": ["outer"]}
    workflow = make(box, edges=edges, functions={"outer": trace, "c": trace})
    workflow.skip("a", by="s")
    workflow.skip("b", by="s")
    workflow.invoke("c", 1, by="s")
    assert workflow.run(timeout=60)["outer"].value == {"outer": {"c": {"c": {"s": 1}}}}
    assert workflow.wait("inner").status == "skipped"


def test_14_all_skipped_skips_the_end(make: Make, box: Mailbox) -> None:
    workflow = make(box, functions=ALL)
    workflow.skip("train", by="plan")
    workflow.skip("probe", by="plan")
    assert workflow.run(timeout=0)["report"].status == "skipped"


def test_14_a_trigger_may_run_a_node_whose_predecessors_were_all_skipped(make: Make, box: Mailbox) -> None:
    workflow = make(box, functions=ALL, triggers={"report": "all_reached"})
    workflow.skip("train", by="plan")
    workflow.skip("probe", by="plan")
    assert workflow.run(timeout=60)["report"].value == {"report": {}}


@pytest.mark.parametrize("timeout", [-1, math.nan])
def test_a_wait_that_would_never_end_is_refused(make: Make, box: Mailbox, timeout: float) -> None:
    workflow = make(box)
    for wait in (workflow.run, lambda timeout: workflow.wait("report", timeout=timeout)):
        with pytest.raises(ConfigError, match="timeout must be None or at least 0 seconds"):
            wait(timeout=timeout)


def test_a_failed_node_fails_those_below_with_its_traceback(make: Make, box: Mailbox) -> None:
    def broken(data: Data, invocation: Invocation) -> None:
        raise ValueError("diverged at step 12")

    workflow = make(box, functions={**ALL, "train": broken})
    workflow.invoke("plan")
    with pytest.raises(
        WorkFailed, match=r"'report' .* predecessor 'evaluate' failed: its predecessor 'train' failed: (.|\n)*diverged at step 12"
    ):
        workflow.run(timeout=60)
    with pytest.raises(WorkFailed, match=r"node 'train' .* failed: Traceback(.|\n)*diverged at step 12"):
        make(box, "other").wait("train")
    assert make(box, "other").wait("probe", timeout=0).status == "done"


# --- dying ---------------------------------------------------------------------------------------------


def test_14_a_party_may_die_at_each_step_and_any_other_goes_on(
    make: Make, box: Mailbox, killed: Callable[..., Mailbox], deaths: Deaths
) -> None:
    edges = {"a": ["b", "x"], "b": ["c"], "c": ["meet"], "x": ["meet"], "meet": ["end"]}

    def work(mailbox: Mailbox, learner_id: str, run_id: str) -> None:
        workflow = make(mailbox, learner_id, edges=edges, run_id=run_id, functions={"x": trace, "meet": trace, "end": trace})
        workflow.invoke("b", by="a", conditional=False)
        workflow.invoke("x", 1, by="a")
        results.append(workflow.run(timeout=100)["end"])

    for number, after in deaths(3):
        results: list[Any] = []
        run_id = f"{number}-{after}"
        try:
            work(killed(box, number, after=after), "mortal", run_id)
            break
        except Crash:
            work(box, "heir", run_id)
            work(box, "late", run_id)
        assert results[0] == results[1]
        assert results[0].value == {"end": {"meet": {"meet": {"x": {"x": {"a": 1}}}}}}, run_id
    assert number > 50


def test_14_a_waiting_party_goes_on_with_a_skip_that_its_author_could_not_finish(
    make: Make, box: Mailbox, killed: Callable[..., Mailbox], deaths: Deaths
) -> None:
    for number, after in deaths():
        run_id = f"{number}-{after}"
        try:
            make(killed(box, number, after=after), "mortal", run_id=run_id).skip("train", by="plan")
            break
        except Crash:
            heir = make(box, "heir", run_id=run_id)
            if not heir.skip("train", by="plan").accepted:
                assert heir.wait("train", timeout=10).status == "skipped"
            heir.skip("probe", by="plan")
            assert heir.wait("report", timeout=10).status == "skipped"
    assert number > 5


def test_10_a_lost_answer_to_any_operation_changes_nothing(make: Make, box: Mailbox, stride: Callable[[int], int]) -> None:
    number, fired = 0, True
    while fired:
        number += stride(3)
        lossy = LostAnswers(PrefixedMailbox(box, f"run-{number}"), nth(number))
        workflow = make(lossy, functions=ALL)
        assert workflow.invoke("plan", 7).accepted
        assert workflow.skip("probe", by="plan").accepted
        assert set(workflow.run(timeout=60)["report"].value["report"]["evaluate"]["evaluate"]) == {"train"}
        fired = bool(lossy.fired)
        assert len([key for key in lossy.inner.list("sync/") if "/claims/" in key]) == 4
    assert number > 50


# --- waiting and bad input -----------------------------------------------------------------------------


def test_run_ends_with_a_timeout_that_names_who_is_missing(make: Make, box: Mailbox) -> None:
    workflow = make(box, functions=ALL)
    workflow.invoke("train", 1, by="plan")
    with pytest.raises(RunTimeout, match=r"'report' .* waits for evaluate after 5 s"):
        workflow.run(timeout=5)
    workflow.skip("probe", by="plan")
    assert workflow.run(timeout=5)["report"].status == "done"


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ({}, "at least one node"),
        ({"a": ["a"]}, "in a circle: a -> a"),
        ({"a": ["b"], "b": ["c"], "c": ["a"]}, "in a circle: .* -> .* -> .* -> "),
        ({"a": "bc"}, "must be a list"),
        ({"a": ["b", "b"]}, "b is named twice"),
        ({"": ["a"]}, "among the nodes must be a non-empty string"),
        ({"<start>": ["a"]}, "stands for the start"),
        ({"a": ["<start>"]}, "stands for the start"),
    ],
)
def test_17_graphs_that_cannot_be_are_refused(edges: Any, message: str, make: Make, box: Mailbox) -> None:
    with pytest.raises(ConfigError, match=message):
        make(box, edges=edges)
    assert list(box.list("")) == []


def test_17_another_graph_under_the_same_run_is_refused(make: Make, box: Mailbox) -> None:
    make(box)
    with pytest.raises(RunMismatch, match="node 'extra' has predecessors plan here and no place there"):
        make(box, edges={**DIAMOND, "plan": ["train", "probe", "extra"]})
    with pytest.raises(RunMismatch, match="trigger 'all_called' here and 'any_called' there"):
        make(box, triggers={"report": "all_called"})
    make(box, run_id="another", triggers={"report": "all_called"})
    make(box)


def test_17_unknown_nodes_are_refused(make: Make, box: Mailbox) -> None:
    workflow = make(box)
    before = list(box.list(""))
    for act in (
        lambda: workflow.invoke("nowhere", by="plan"),
        lambda: workflow.invoke("evaluate", by="plan"),
        lambda: workflow.invoke("evaluate"),
        lambda: workflow.wait("nowhere"),
        lambda: make(box, functions={"nowhere": trace}),
        lambda: make(box, triggers={"nowhere": "all_called"}),
        lambda: make(box, triggers={"train": "sometimes"}),
        lambda: workflow.wait("train", timeout=-1),
    ):
        with pytest.raises(ConfigError):
            act()
    assert list(box.list("")) == before


def test_19_nodes_may_have_any_names(make: Make, box: Mailbox) -> None:
    workflow = make(
        box,
        edges={"a/b ü": ["日本", "."], "日本": [".."], ".": [".."]},
        run_id="r/7",
        functions=dict.fromkeys(("a/b ü", "日本", ".", ".."), trace),
    )
    workflow.invoke("a/b ü", 1)
    assert set(workflow.run(timeout=60)[".."].value[".."]) == {"日本", "."}
