"""Whole trainings under simulation: the invariants hold on every seed, and a broken seed says what is broken."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from planted_bugs import BUGS, caught

from gradientmail_torch.session.leaving import Leaving
from gradientmail_torch.testing import explore
from gradientmail_torch.testing.training import Invariant, Scenario, Violation, simulate

SEEDS = 300

CAUGHT = {
    "deletes_before_reading": (14, Invariant.KEPT),
    "lives_overwrite": (8, Invariant.ONE_LIFE),
    "deletes_commits": (0, Invariant.ONE_COMMIT),
    "never_fenced": (64, Invariant.ONE_LIFE),
    "contributes_first": (3, Invariant.ADOPT_FIRST),
    "never_records_again": (1, Invariant.ENDS),
    "decides_by_learner_id": (105, Invariant.BOOKS),
    "skips_rounds_unread": (48, Invariant.BOOKS),
    "keeps_the_rejected": (133, Invariant.BOOKS),
    "too_old_is_lost": (3, Invariant.BOOKS),
    "closes_after_one_commit": (0, Invariant.COMPLETE),
    "own_silence_is_death": (24, Invariant.SILENCE),
    "only_the_first_claims": (4, Invariant.ENDS),
    "claims_never_end": (4, Invariant.ENDS),
    "no_merge_timeout": (4, Invariant.ENDS),
    "commits_overwrite": (8, Invariant.ONE_COMMIT),
    "clips_plain_norms": (3, Invariant.REPLAY),
    "no_empty_commit": (3557, Invariant.ENDS),
    "no_read_back": (8, Invariant.ENDS),
    "merges_twice": (0, Invariant.REPLAY),
    "drops_carried_progress": (0, Invariant.BOOKS),
    "keeps_what_is_merged": (0, Invariant.BOOKS),
    "no_outer_state": (0, Invariant.REPLAY),
    "forgets_outer_state": (0, Invariant.REPLAY),
    "no_grace": (0, Invariant.GRACE),
    "compares_clocks": (0, Invariant.SILENCE),
    "keeps_nan": (11, Invariant.COMPLETE),
    "record_before_data": (0, Invariant.KEPT),
    "sweeps_what_is_under_way": (414, Invariant.KEPT),
    "keeps_too_few": (1, Invariant.KEPT),
    "whole_of_the_version_before": (2, Invariant.SAME_BITS),
    "wholes_are_taken_for_granted": (55, Invariant.ENDS),
    "wholes_are_not_checked": (55, Invariant.SAME_BITS),
    "promises_supersede": (49, Invariant.KEPT),
    "counts_the_summed_again": (0, Invariant.REPLAY),
    "merges_sums_alone": (0, Invariant.COMPLETE),
    "sums_are_not_checked": (30, Invariant.REPLAY),
    "waits_for_every_sum": (230, Invariant.ENDS),
    "takes_rounds_for_claimed": (109, Invariant.ENDS),
    "sums_overwrite": (120, Invariant.REPLAY),
    "holds_nothing_back": (2, Invariant.BOOKS),
    "leaves_sparsely": (2, Invariant.COMPLETE),
    "credits_what_was_lost": (2, Invariant.COMPLETE),
    "weighs_by_samples": (0, Invariant.REPLAY),
    "takes_over_at_once": (1, Invariant.ONE_LIFE),
    "adopts_under_another_version": (19, Invariant.SAME_BITS),
    "barrier_opens_early": (0, Invariant.BARRIER),
}
"""A seed that catches each planted bug, and by what. ``python tests/testing/planted_bugs.py`` finds them anew."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_invariant_holds_on_every_seed() -> None:
    command = [sys.executable, "-m", "gradientmail_torch.testing.explore", "--seeds", f"{SEEDS}", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds" in done.stdout
    assert "broken: none" in done.stdout


def test_the_seeds_try_all_that_can_go_wrong() -> None:
    happened: Counter[str] = Counter()
    for seed in range(40):
        world = simulate(seed)
        for event in world.cluster.log:
            happened.update((event.what, event.outcome))
        happened.update(process.value.how for process in world.cluster.processes if process.value is not None)
    for what in ("kill", "pause", "outage", "answer lost", "refused", "exists", "closed", "LearnerIdInUse", "LearnerFenced"):
        assert happened[what], f"{what!r} does not come up: the seeds no longer try it"


def test_the_scenarios_differ_in_all_that_can_be_set() -> None:
    scenarios = [Scenario.draw(seed) for seed in range(300)]
    troubles = Counter(trouble.what for scenario in scenarios for trouble in scenario.troubles)
    assert troubles.keys() == {"kill", "pause", "outage", "double", "alter", "remove", "alter extras"}
    assert {type(scenario.algorithm).__name__ for scenario in scenarios} == {"DecoupledDiLoCo", "DiLoCo", "LocalSGD"}
    assert {scenario.algorithm.quorum for scenario in scenarios} >= {1, 2}
    assert {scenario.settings["keep"] for scenario in scenarios} == {1, 2, 4, None}
    assert {scenario.settings["poll_interval"] for scenario in scenarios} == {1.0, 2.0, None}
    assert {scenario.algorithm.wire for scenario in scenarios} == {"fp32", "bf16", "sparse"}
    assert any(learner.stuck for scenario in scenarios for learner in scenario.learners)
    assert any(scenario.queue for scenario in scenarios)
    assert any(scenario.report for scenario in scenarios)
    assert any(scenario.large for scenario in scenarios)


def test_a_seed_gives_one_trace_whatever_the_order_of_sets() -> None:
    code = """if True:
        import hashlib
        from gradientmail_torch.testing.training import simulate
        print([hashlib.sha256(simulate(seed).cluster.trace().encode()).hexdigest() for seed in (0, 13, 18)])"""
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert digests == {str([hashlib.sha256(simulate(seed).cluster.trace().encode()).hexdigest() for seed in (0, 13, 18)])}


def test_a_request_that_takes_effect_while_its_sender_and_his_clock_stand_still_was_made_before() -> None:
    """It was taken for one of long ago, and whoever had watched a silence before it for one who had not."""
    simulate(70057, scenario=replace(Scenario.draw(70057), large=True))


def test_every_planted_bug_is_in_the_table() -> None:
    assert CAUGHT.keys() == BUGS.keys()


@pytest.mark.parametrize("name", CAUGHT)
def test_a_planted_bug_is_caught(name: str) -> None:
    seed, by = CAUGHT[name]
    assert caught(BUGS[name], seed) is by


# --- what a broken seed says -------------------------------------------------------------------------------


def test_a_broken_seed_shows_its_scenario_its_trace_and_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leaving, "_contribute_rest", lambda self: None)
    monkeypatch.setattr(Leaving, "_left", lambda self, *, on_its_way_only: "")
    with pytest.raises(Violation, match="has closed with") as broken:
        simulate(0)
    notes = "\n".join(broken.value.__notes__)
    assert str(Scenario.draw(0)) in notes
    assert "the end of the log:" in notes
    assert "explore --trace 0" in notes


def test_the_command_names_the_broken_seeds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Leaving, "_contribute_rest", lambda self: None)
    monkeypatch.setattr(Leaving, "_left", lambda self, *, on_its_way_only: "")
    assert explore.main(["--start", "0", "--seeds", "2", "--processes", "1"]) == 1
    shown = capsys.readouterr().out
    assert "broken: [0, 1]" in shown
    assert str(Scenario.draw(1)) in shown


def test_the_command_shows_the_trace_of_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert explore.main(["--trace", "7"]) == 0
    shown = capsys.readouterr().out
    assert "put_if_absent  run.json -> created" in shown
    assert "all holds" in shown
