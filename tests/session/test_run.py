"""Founding, opening and reading a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo
from gradientmail_torch.algorithms.layout import split
from gradientmail_torch.algorithms.model_tensors import describe
from gradientmail_torch.errors import CorruptObject, MailboxUnavailable, RunMismatch
from gradientmail_torch.mailbox import Mailbox, open_mailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import Commit, Manifest, encode, read, reference
from gradientmail_torch.session import align
from gradientmail_torch.session.run import Founding, Run
from gradientmail_torch.testing.faults import Crash, CrashAfter, CrashBefore, Interposed, LostAnswers, nth

ALGORITHM = DecoupledDiLoCo(fragments=2)


def model(value: float = 0.0) -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


LAYOUT = split(describe(model()), 2)


def values_of(value: float) -> Callable[[int], list[Tensor]]:
    return lambda fragment: [
        torch.full(spec.shape, value) if spec.floating else torch.zeros(spec.shape, dtype=torch.int64) for spec in LAYOUT[fragment]
    ]


def join(mailbox: Mailbox, value: float = 0.0, learner_id: str = "a", algorithm: DecoupledDiLoCo = ALGORITHM) -> Run:
    return Run.join(mailbox, Founding(LAYOUT, algorithm, learner_id, 1.0, values_of(value)))


def first_number(run: Run) -> float:
    return float(run.initial(0)[0].flatten()[0])


# --- founding ------------------------------------------------------------------------------------------


def test_an_empty_mailbox_holds_no_run(mailbox: MemoryMailbox) -> None:
    assert Run.open(mailbox) is None


def test_the_first_founds_the_run_and_the_next_joins_it(mailbox: MemoryMailbox) -> None:
    assert first_number(join(mailbox, 1.0, "a")) == 1.0
    run = join(mailbox, 2.0, "b")
    assert first_number(run) == 1.0
    assert run.manifest.founder == "a"
    assert len(list(mailbox.list("init/"))) == 2, "nobody has left anything beside it"


def test_the_initial_value_is_there_before_the_manifest_that_names_it(mailbox: MemoryMailbox) -> None:
    box = CrashBefore(mailbox, lambda operation, key: key == keys.RUN and operation == "put_if_absent")
    with pytest.raises(Crash):
        join(box)
    assert len(list(mailbox.list("init/"))) == 2
    assert Run.open(mailbox) is None


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("crash", [CrashBefore, CrashAfter])
def test_a_founder_that_dies_half_way_leaves_no_run_and_the_next_one_founds_it(
    mailbox: MemoryMailbox, number: int, crash: type[CrashBefore]
) -> None:
    with pytest.raises(Crash):
        join(crash(mailbox, nth(number, operations=("put",))), 1.0)
    assert first_number(join(mailbox, 2.0, "b")) == 2.0


def test_of_two_who_found_at_once_both_have_the_winners_parameters_and_the_losers_are_removed(mailbox: MemoryMailbox) -> None:
    class Meeting(CrashBefore):
        """b founds while a is about to."""

        def put_if_absent(self, key: str, body: Any) -> bool:
            join(mailbox, 2.0, "b")
            return mailbox.put_if_absent(key, body)

    run = join(Meeting(mailbox, lambda operation, key: False), 1.0, "a")
    assert first_number(run) == 2.0
    assert run.manifest.founder == "b"
    assert len(list(mailbox.list("init/"))) == 2


def test_a_run_that_was_founded_and_gone_on_with_while_it_was_looked_for_is_joined(mailbox: MemoryMailbox) -> None:
    """Simulated training, seed 204."""

    class Slow(Interposed):
        def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
            join(mailbox, 1.0, "other")
            mailbox.put(keys.commit(0, 1), encode(Commit(nonce="0" * 32, fragment=0, version=1, by="other", generation=1)))
            return super().list(prefix, after=after)

    assert join(Slow(mailbox), 2.0).manifest.founder == "other"


def test_a_founder_whose_answer_was_lost_has_founded_it_all_the_same(mailbox: MemoryMailbox) -> None:
    box = LostAnswers(mailbox, lambda operation, key: key == keys.RUN and operation == "put_if_absent")
    with pytest.raises(MailboxUnavailable):
        join(box, 1.0)
    assert first_number(join(mailbox, 2.0)) == 1.0


@pytest.mark.parametrize("trial", range(3))
def test_many_who_found_at_once_all_have_the_same_run(mailbox_url: str, trial: int) -> None:
    found: list[tuple[str, float]] = []
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def found_it(value: float) -> None:
        try:
            box = open_mailbox(mailbox_url)
            start.wait()
            run = join(box, value, f"node-{value:g}")
            found.append((run.manifest.nonce, first_number(run)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=found_it, args=(float(value),)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(list(open_mailbox(mailbox_url).list("init/"))) == 2


# --- joining -------------------------------------------------------------------------------------------


def test_another_protocol_is_refused(mailbox: MemoryMailbox) -> None:
    join(mailbox)
    manifest = read(mailbox, Manifest, keys.RUN)
    assert manifest is not None
    mailbox.put(keys.RUN, encode(msgspec.structs.replace(manifest, protocol=2)))
    with pytest.raises(RunMismatch, match="protocol 2"):
        join(mailbox)


def test_an_algorithm_setting_of_another_value_is_named_with_both(mailbox: MemoryMailbox) -> None:
    join(mailbox)
    with pytest.raises(RunMismatch, match="'buffers' is False here and True in the run"):
        join(mailbox, algorithm=DecoupledDiLoCo(buffers=False))


def test_a_setting_that_the_founder_did_not_know_is_a_difference(mailbox: MemoryMailbox) -> None:
    join(mailbox)
    manifest = read(mailbox, Manifest, keys.RUN)
    assert manifest is not None
    settings = {name: value for name, value in manifest.algorithm.items() if name != "merge"}
    mailbox.put(keys.RUN, encode(msgspec.structs.replace(manifest, algorithm=settings)))
    with pytest.raises(RunMismatch, match="'merge' is 'auto' here and None in the run"):
        join(mailbox)


def test_a_manifest_that_vanishes_while_the_run_is_founded_is_an_error(mailbox: MemoryMailbox) -> None:
    class Vanishing(CrashBefore):
        def put_if_absent(self, key: str, body: Any) -> bool:
            return True

    with pytest.raises(CorruptObject, match=r"vanished.*who deletes"):
        join(Vanishing(mailbox, lambda operation, key: False))


# --- commits -------------------------------------------------------------------------------------------


def commit(run: Run, version: int, value: float, *, fragment: int = 0) -> Commit:
    key = keys.data(fragment, version, "a", f"{version:032x}", "whole")
    ref, _ = run.publish(key, values_of(value)(fragment), LAYOUT[fragment], "fp32")
    made = Commit(nonce=f"{version:032x}", fragment=fragment, version=version, by="a", generation=1, parameters=ref)
    run.mailbox.put(keys.commit(fragment, version), encode(made))
    return made


def test_the_newest_version_is_the_initial_one_and_then_that_of_the_newest_commit(mailbox: MemoryMailbox) -> None:
    run = join(mailbox, 1.0)
    assert run.newest_version(0) == 0
    found, values = run.newest(0)
    assert found is None
    assert values[0].flatten()[0] == 1.0
    for version in (1, 2, 3):
        commit(run, version, 10.0 + version)
    assert run.newest_version(0) == run.newest_version(0, from_version=2) == 3
    assert run.newest_version(1) == 0
    found, values = run.newest(0, from_version=1)
    assert found is not None
    assert found.version == 3
    assert values[0].flatten()[0] == 13.0


def test_a_commit_that_was_copied_to_another_place_is_corrupt(mailbox: MemoryMailbox) -> None:
    run = join(mailbox)
    commit(run, 1, 1.0)
    for key in (keys.commit(0, 2), keys.commit(1, 1)):
        mailbox.put(key, mailbox.get(keys.commit(0, 1)) or b"")
        with pytest.raises(CorruptObject, match="was copied there"):
            run.commit(*keys.parse_round(key)[:2])


def test_retention_that_overtakes_a_reader_makes_it_look_again(mailbox: MemoryMailbox) -> None:
    run = join(mailbox)
    old = commit(run, 1, 1.0)

    class Overtaking(CrashBefore):
        def get(self, key: str, **window: Any) -> bytes | None:
            if old.parameters is not None and key == old.parameters.key:
                commit(Run(mailbox, run.manifest), 2, 2.0)
                mailbox.delete(key)
            return mailbox.get(key, **window)

    found, values = Run(Overtaking(mailbox, lambda operation, key: False), run.manifest).newest(0)
    assert found is not None
    assert (found.version, float(values[0].flatten()[0])) == (2, 2.0)


def test_data_that_the_newest_commit_names_and_that_is_gone_is_an_error_with_the_cure(mailbox: MemoryMailbox) -> None:
    run = join(mailbox)
    made = commit(run, 1, 1.0)
    assert made.parameters is not None
    mailbox.delete(made.parameters.key)
    with pytest.raises(CorruptObject, match=r"fragment 0 needs at version 1.*restore it"):
        run.newest(0)


def test_data_that_was_altered_is_an_error_that_names_it(mailbox: MemoryMailbox) -> None:
    run = join(mailbox)
    made = commit(run, 1, 1.0)
    assert made.parameters is not None
    data = mailbox.get(made.parameters.key) or b""
    mailbox.put(made.parameters.key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptObject, match=made.parameters.key):
        run.newest(0)


def test_a_commit_without_parameters_or_update_is_corrupt(mailbox: MemoryMailbox) -> None:
    run = join(mailbox)
    empty = Commit(nonce="0" * 32, fragment=0, version=1, by="a", generation=1)
    mailbox.put(keys.commit(0, 1), encode(empty))
    with pytest.raises(CorruptObject, match="neither parameters nor an update"):
        run.newest(0)


# --- aligning ------------------------------------------------------------------------------------------


def test_align_loads_the_newest_commit_of_every_fragment_and_says_which(mailbox: MemoryMailbox) -> None:
    run = join(mailbox, 1.0)
    for version in (1, 2):
        commit(run, version, 10.0 + version, fragment=1)
    ours = model(7.0)
    assert align(ours, mailbox=mailbox) == (0, 2)
    found = {float(parameter.detach().flatten()[0]) for parameter in ours.parameters()}
    assert found == {1.0, 12.0}


def test_align_takes_a_url(tmp_path: Any) -> None:
    join(open_mailbox(tmp_path), 3.0)
    ours = model()
    align(ours, mailbox=tmp_path)
    assert all((parameter == 3.0).all() for parameter in ours.parameters())


def test_align_without_a_run_says_what_founds_one(mailbox: MemoryMailbox) -> None:
    with pytest.raises(RunMismatch, match="holds no run: a Session founds one"):
        align(model(), mailbox=mailbox)


def test_align_of_another_model_is_refused(mailbox: MemoryMailbox) -> None:
    join(mailbox)
    with pytest.raises(RunMismatch, match=r"tensor '0\.weight'"):
        align(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), mailbox=mailbox)


def test_align_takes_a_model_that_is_frozen_or_has_more_than_the_run(mailbox: MemoryMailbox, caplog: pytest.LogCaptureFixture) -> None:
    join(mailbox, 3.0)
    ours = model().requires_grad_(False)
    ours.append(nn.Linear(1, 1))
    align(ours, mailbox=mailbox)
    assert (ours[0].weight == 3.0).all()
    assert "2 trainable parameters of this model are not in the run" in caplog.text


def test_align_of_a_run_without_buffers_leaves_them_alone(mailbox: MemoryMailbox) -> None:
    layout = split(describe(model(), buffers=False), 2)
    algorithm = DecoupledDiLoCo(fragments=2, buffers=False)
    Run.join(mailbox, Founding(layout, algorithm, "a", 0.0, lambda fragment: [torch.full(spec.shape, 2.0) for spec in layout[fragment]]))
    ours = model()
    ours[1].running_mean.fill_(5.0)
    align(ours, mailbox=mailbox)
    assert ours[1].running_mean.tolist() == [5.0] * 3
    assert (ours[0].weight == 2.0).all()


def test_a_reference_names_key_length_digest_and_format() -> None:
    ref = reference("data/k", b"abc", wire="bf16")
    assert (ref.key, ref.size, ref.wire) == ("data/k", 3, "bf16")
    assert ref.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
