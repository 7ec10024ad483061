"""A replica's books against an exact model: integers, so that every sum can be followed to the last bit."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from gradientmail_torch.algorithms import DecoupledDiLoCo, wire
from gradientmail_torch.algorithms.adoption import Outcome
from gradientmail_torch.messages import Commit, DataRef, LeftOut, Merged, TensorSpec
from gradientmail_torch.session.parameters import LocalParameters, difference
from gradientmail_torch.session.replica import Fragment, Pending, Replica, Work, joined

NONCE = "{:016x}".format
REF = DataRef(key="data/k", size=1, sha256="0" * 64)
SPECS = (
    TensorSpec(name="w", shape=(3,), dtype="float32"),
    TensorSpec(name="statistics", shape=(2,), dtype="float32", kind="buffer"),
)
numbers = st.integers(-500, 500)


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        self.register_buffer("statistics", torch.zeros(2))


class Interruptible(LocalParameters):
    """What the background does while the training thread changes the parameters."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def _now(self) -> None:
        happening, self.meanwhile = self.meanwhile, lambda: None
        happening()

    def shift(self, *args: Any) -> Any:
        self._now()
        result = super().shift(*args)
        self._now()
        return result

    def write(self, *args: Any) -> Any:
        self._now()
        return super().write(*args)


def encoded(pending: Pending, fragment: Fragment) -> bytes:
    assert pending.snapshot is not None
    return wire.encode(difference(pending.snapshot(), fragment.base, SPECS), SPECS, pending.wire)


def a_commit(version: int, *, merged: list[str] = [], left_out: dict[str, str] = {}) -> Commit:  # noqa: B006
    return Commit(
        nonce=NONCE(10**9 + version),
        fragment=0,
        version=version,
        by="other",
        generation=1,
        parameters=REF,
        merged=tuple(Merged(nonce=n, learner_id="x", generation=1, steps=1, samples=1, weight=1.0, data=REF) for n in merged),
        left_out=tuple(LeftOut(nonce=n, learner_id="x", reason=reason) for n, reason in left_out.items()),
    )


class Books(RuleBasedStateMachine):
    """``here`` is what the parameters should be, ``flying`` and ``since`` the two parts of what the base lacks."""

    dtype = torch.float32
    adoption = "rebase"

    @initialize()
    def begin(self) -> None:
        self.model = Model(self.dtype)
        self.access = Interruptible(self.model, (SPECS,))
        fragment: Fragment = joined(0, SPECS, None, [torch.zeros(3), torch.zeros(2)], 10**9)
        self.replica = Replica(self.access, DecoupledDiLoCo(adoption=self.adoption, wire="fp32"), [fragment])  # type: ignore[arg-type]
        self.replica.load()
        self.fragment = fragment
        self.committed: dict[int, Tensor] = {0: torch.zeros(3)}
        self.flying: Tensor | None = None
        self.flying_is_here = False
        self.since = torch.zeros(3)
        self.fates: dict[int, str] = {}  # of the present contribution, by version
        self.nonces = 0
        self.merged_steps = self.discarded_steps = 0
        self.total_steps = 0
        self.since_steps = 0
        self.flying_steps = 0

    # --- the training thread

    @rule(change=numbers, samples=st.integers(1, 9))
    def step(self, change: int, samples: int) -> None:
        before = self.parameters()
        with torch.no_grad():
            self.model.w.add_(change)
        self.replica.count(1, samples)
        self.since = self.since + (self.parameters() - before)
        self.since_steps += 1
        self.total_steps += 1

    @precondition(lambda self: self.fragment.pending is None and self.since_steps)
    @rule()
    def contribute(self) -> None:
        self.nonces += 1
        self.replica.contribute(self.fragment, NONCE(self.nonces))
        self.flying, self.flying_is_here, self.since = self.since, True, torch.zeros(3)
        self.flying_steps, self.since_steps = self.since_steps, 0
        self.fates = {}

    @rule(interrupted=st.none() | st.integers(1, 2), data=st.data())
    def adopt(self, interrupted: int | None, data: st.DataObject) -> None:
        if interrupted:
            self.access.meanwhile = lambda: (self.new_commit(interrupted, data), self.replica.prepare(self.fragment))
        staged, outcome = self.fragment.staged, self.fragment.pending.outcome if self.fragment.pending else None
        adopted = self.replica.adopt(self.fragment)
        self.access.meanwhile = lambda: None
        if adopted:
            assert staged is not None
            self.expect_adoption(staged.version, outcome)

    def expect_adoption(self, version: int, outcome: Outcome | None) -> None:
        assert self.fragment.version == version
        if self.adoption == "overwrite" or outcome is Outcome.REJECTED:
            self.discarded_steps += self.since_steps
            self.since, self.since_steps, self.flying_is_here = torch.zeros(3), 0, False
        match outcome:
            case Outcome.MERGED:
                self.merged_steps += self.flying_steps
            case Outcome.RETRY if self.adoption == "rebase":
                self.since, self.since_steps = self.since + self.flying, self.since_steps + self.flying_steps
            case Outcome.RETRY | Outcome.REJECTED:
                self.discarded_steps += self.flying_steps
            case _:
                return
        self.flying, self.flying_is_here, self.flying_steps = None, False, 0

    @precondition(lambda self: self.fragment.pending is None and self.since_steps)
    @rule(change=st.none() | numbers)
    def offer(self, change: int | None) -> None:
        self.contribute()
        self.encode()
        if change is not None:
            self.step(change, 2)

    @rule(ahead=st.integers(1, 3), interrupted=st.none() | st.integers(1, 2), data=st.data())
    def take_a_commit(self, ahead: int, interrupted: int | None, data: st.DataObject) -> None:
        self.new_commit(ahead, data)
        self.prepare()
        self.adopt(interrupted, data)
        self.adopt(None, data)

    # --- the background

    @precondition(lambda self: self.fragment.pending is not None and self.fragment.pending.sent is None)
    @rule()
    def encode(self) -> None:
        """The publisher's part, with a wire format that loses nothing."""
        pending = self.fragment.pending
        assert pending.snapshot is not None
        pending.sent = encoded(pending, self.fragment)
        pending.snapshot = None
        pending.version = self.fragment.known + 1

    @precondition(lambda self: self.offered() and self.fragment.pending.version <= self.fragment.known)
    @rule()
    def record_again(self) -> None:
        self.fragment.pending.version = self.fragment.known + 1

    def offered(self) -> bool:
        pending = self.fragment.pending
        return pending is not None and pending.sent is not None and pending.outcome is Outcome.OPEN

    @rule(ahead=st.integers(1, 3), data=st.data())
    def hear_of_a_commit(self, ahead: int, data: st.DataObject) -> None:
        self.new_commit(ahead, data)

    def new_commit(self, ahead: int, data: st.DataObject) -> None:
        version = self.fragment.known + ahead
        commits = {v: a_commit(v) for v in range(self.fragment.known + 1, version + 1)}
        pending = self.fragment.pending
        if self.offered() and pending.version in commits:
            fate = data.draw(st.sampled_from(["merged", "late", "missing", "tensor 'w' is not finite"]), label="fate")
            commits[pending.version] = {
                "merged": lambda: a_commit(pending.version, merged=[NONCE(77), pending.nonce]),
                "late": lambda: a_commit(pending.version, merged=[NONCE(77)], left_out={NONCE(78): "missing"}),
            }.get(fate, lambda: a_commit(pending.version, left_out={pending.nonce: fate}))()
        values = torch.tensor([float(data.draw(numbers)) for _ in range(3)])
        self.committed[version] = values
        told = self.replica.stage(self.fragment, commits[version], [values, values[:2] + 0.5])
        skips_ours = self.offered() and pending.version < version
        if not told:
            assert skips_ours, "only the round that may hold our contribution has to be read"
            assert self.fragment.known < version
            assert self.replica.stage(self.fragment, commits[version], [values, values[:2] + 0.5], [commits[pending.version]])
        assert self.fragment.known == version

    @precondition(lambda self: self.fragment.known)
    @rule(back=st.integers(0, 3))
    def hear_of_an_old_commit(self, back: int) -> None:
        before = (self.fragment.known, self.fragment.staged)
        version = max(1, self.fragment.known - back)
        assert self.replica.stage(self.fragment, a_commit(version), [torch.full((3,), 9e9), torch.zeros(2)])
        assert (self.fragment.known, self.fragment.staged) == before

    @rule()
    def prepare(self) -> None:
        self.replica.prepare(self.fragment)

    # --- what holds

    def parameters(self) -> Tensor:
        return self.model.w.detach().float().clone()

    def begun(self) -> bool:
        return hasattr(self, "fragment")

    @invariant()
    def parameters_are_base_and_flight_and_since(self) -> None:
        if not self.begun():
            return
        local = self.since + (self.flying if self.flying is not None and self.flying_is_here else 0)
        assert torch.equal(self.parameters() - self.fragment.base[0], local)

    @invariant()
    def the_adopted_value_is_the_committed_one_and_the_base_what_the_device_holds_of_it(self) -> None:
        if not self.begun():
            return
        assert torch.equal(self.fragment.values[0], self.committed[self.fragment.version])
        newest = self.fragment.newest_values()[0]
        assert torch.equal(newest, self.committed[self.fragment.known])
        off = (self.fragment.base[0] - self.fragment.values[0]).abs()
        if self.dtype == torch.float32:
            assert not off.any()
        else:
            assert (off <= (self.parameters().abs() + 1500) / 128).all(), "never off by more than the device's rounding"

    @invariant()
    def every_step_is_carried_merged_or_discarded(self) -> None:
        if not self.begun():
            return
        tally, pending = self.replica.tally, self.fragment.pending
        carried = self.replica.uncontributed(self.fragment) + (pending.work if pending else Work())
        whole = carried + tally.merged_work + tally.discarded_work
        assert (whole.steps, whole.samples) == (self.replica.total.steps, self.replica.total.samples)
        assert self.replica.total.steps == self.total_steps
        assert tally.merged_work.steps == self.merged_steps
        assert tally.discarded_work.steps == self.discarded_steps
        assert self.replica.uncontributed(self.fragment).steps == self.since_steps

    @invariant()
    def with_no_local_progress_the_parameters_are_the_committed_ones(self) -> None:
        if self.begun() and self.dtype == torch.float32 and not self.since_steps and not (self.flying_steps and self.flying_is_here):
            assert torch.equal(self.parameters(), self.fragment.values[0])
            if self.fragment.version:
                assert torch.equal(self.model.statistics, self.committed[self.fragment.version][:2] + 0.5)


class BooksInBf16(Books):
    """The device rounds: what it does not hold of a commit is caught up with by the next one."""

    dtype = torch.bfloat16


class BooksOverwritten(Books):
    adoption = "overwrite"


Books.TestCase.settings = BooksInBf16.TestCase.settings = BooksOverwritten.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestBooks = Books.TestCase
TestBooksInBf16 = BooksInBf16.TestCase
TestBooksOverwritten = BooksOverwritten.TestCase


def test_the_books_hold_while_two_threads_write_in_them() -> None:
    """The training thread steps, contributes and adopts; the background encodes, stages and prepares; at full speed."""
    model = Model(torch.float32)
    fragment = joined(0, SPECS, None, [torch.zeros(3), torch.zeros(2)], 10**9)
    replica = Replica(LocalParameters(model, (SPECS,)), DecoupledDiLoCo(wire="fp32"), [fragment])
    replica.load()
    ended = threading.Event()
    errors: list[BaseException] = []
    sums = {"taken": torch.zeros(3), "trained": torch.zeros(3)}

    def background() -> None:
        rng = random.Random(1)
        try:
            while not ended.is_set():
                pending = fragment.pending
                if pending is not None and pending.sent is None and pending.snapshot is not None:
                    sent = encoded(pending, fragment)
                    with replica.lock:
                        pending.sent, pending.snapshot = sent, None
                        pending.version = fragment.known + 1
                if fragment.staged is None or rng.random() < 0.1:
                    version, merged = fragment.known + 1, []
                    if pending is not None and pending.sent is not None and pending.outcome is Outcome.OPEN and rng.random() < 0.5:
                        merged = [pending.nonce]
                        pending.version = version
                    value = torch.tensor([float(rng.randint(-9, 9)) for _ in range(3)])
                    assert replica.stage(fragment, a_commit(version, merged=merged), [value, value[:2]])
                for _ in range(rng.randint(0, 3)):
                    replica.prepare(fragment)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    other = threading.Thread(target=background)
    other.start()
    try:
        merged_before = 0
        flying = torch.zeros(3)
        for number in range(1_000_000):
            if errors or replica.tally.merged >= 40:
                break
            with torch.no_grad():
                model.w.add_(number % 7 - 3)
            sums["trained"] += number % 7 - 3
            replica.count(1, 1)
            replica.adopt(fragment)
            if replica.tally.merged > merged_before:
                merged_before = replica.tally.merged
                sums["taken"] += flying
            if fragment.pending is None:
                flying = model.w.detach() - fragment.base[0]
                replica.contribute(fragment, NONCE(number + 1))
            local = model.w.detach() - fragment.base[0]
            assert torch.equal(local, sums["trained"] - sums["taken"]), f"at step {number}"
    finally:
        ended.set()
        other.join(10)
        sys.setswitchinterval(interval)
    assert errors == []
    assert replica.tally.merged == 40
