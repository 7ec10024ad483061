"""The trainings behind the tables of settings, in small."""

from __future__ import annotations

import torch

from benchmarks import convergence, work
from benchmarks.simulated import Experiment, run


def test_nodes_share_the_global_batch() -> None:
    whole = work.batch(3, seed=1)
    parts = [work.batch(3, seed=1, node=node, nodes=4) for node in range(4)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(work.batch(3, seed=2), whole)


def test_steps_are_shared_out_by_speed_and_by_the_time_that_a_node_is_there() -> None:
    assert Experiment(speeds=(1.0, 0.5)).steps() == [400, 200]
    assert Experiment(joins_at=0.5).steps() == [400, 200]


def test_every_row_of_every_table_can_be_built_and_is_told_from_the_others() -> None:
    for table in convergence.TABLES.values():
        keys = [convergence.key_of(experiment, 0) for experiment in table.rows.values()]
        assert len(set(keys)) == len(keys)
        for experiment in table.rows.values():
            if not isinstance(experiment, str):
                experiment.build()


def test_a_small_training_commits_what_its_nodes_did() -> None:
    found = run(Experiment(tokens=6 * work.TOKENS_PER_STEP, settings={"sync_every": 3, "adoption": "rebase"}), seed=0)
    assert found["loss"] < 5.5
    assert found["versions"][0] >= 2
    assert [node["discarded_steps"] for node in found["nodes"]] == [0, 0]
