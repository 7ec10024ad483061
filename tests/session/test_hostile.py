"""Objects that no learner of the run has written: they are refused and named, and training goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo, wire
from gradientmail_torch.errors import CorruptObject
from gradientmail_torch.mailbox import Mailbox, SignedMailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import Beat, Commit, Contribution, encode, read, reference
from gradientmail_torch.patterns.barrier import Barrier
from gradientmail_torch.session import align

KEY = "a secret of the run, long enough"
NONCE = "e" * 32

ALGORITHM = DecoupledDiLoCo(sync_every=4, fragments=1, wire="fp32", commit_wire="fp32", grace=3.0)


class Two:
    """Learners ``a`` and ``b``, who have each committed something, and the store as an intruder sees it."""

    def __init__(self, world: Any, store: MemoryMailbox, *, signed: bool, algorithm: DecoupledDiLoCo = ALGORITHM) -> None:
        self.world, self.store = world, store
        self.box: Mailbox = SignedMailbox(store, KEY) if signed else store
        self.a, self.b = (world.node(name, algorithm, mailbox=self.box) for name in "ab")
        world.meet()
        self.train(8)

    @property
    def open_version(self) -> int:
        return max(node.fragment.known for node in (self.a, self.b)) + 1

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for node in (self.a, self.b):
                if not node.session._closed:
                    node.train(0.5)
            self.world.turn()

    def train_until(self, version: int) -> None:
        for _ in range(200):
            if self.open_version > version:
                return
            self.train(1)
        raise AssertionError(f"version {version} was never committed")

    def settle(self) -> None:
        """Until nothing is on its way."""
        for _ in range(100):
            self.world.turn()
            for node in (self.a, self.b):
                node.boundary()
            if self.a.fragment.pending is None and self.b.fragment.pending is None:
                return
            self.train(1)
        raise AssertionError("something is on its way for ever")

    def finish(self) -> None:
        """All that is still there close their sessions; what they have done is committed, and they agree."""
        nodes = [node for node in (self.a, self.b) if not node.session._closed]
        for node in nodes:
            node.session.close(timeout=120)
        for node in nodes:
            stats = node.session.stats()
            assert stats.tally.merged_work.steps + stats.tally.discarded_work.steps == stats.steps
            assert stats.tally.discarded_work.steps == 0
        values = []
        for node in nodes:
            align(node.model, mailbox=self.box)
            values.append(node.w)
        assert len({tuple(value) for value in values}) == 1
        assert all(torch.isfinite(node.model.w).all() for node in nodes)


@pytest.fixture(params=["unsigned", "signed"])
def two(request: pytest.FixtureRequest, world: Any, mailbox: MemoryMailbox) -> Two:
    return Two(world, mailbox, signed=request.param == "signed")


GARBAGE = [b"", b"\0" * 100, b"{}", b"null", b'{"nonce": 5}', b"[" * 5000, b"GMS1", b"GMS1" + b"x" * 100]
garbage = pytest.mark.parametrize("content", GARBAGE, ids=lambda content: repr(content[:12]))

ODD_KEYS = [
    "beats/evil", "beats/evil/zzz", "beats/a/000001/x", "beats/a/1", "beats/.DS_Store",
    "learners/a/README", "learners/a/.tmp", "learners/a/7", "learners/evil",
    "rounds/README", "rounds/0000/x/y", "rounds/0000/0000000003", "rounds/0000/0000000003/a/b", "rounds/9999/0000000003/a",
    "rounds/0000/0000000003/.hidden", "rounds/0000/9999999999/evil",
    "claims/0000/x", "claims/0000/0000000003/zzz",
    "commits/README", "commits/0000/README", "commits/0000/.tmp", "commits/0000/0000000001/x", "commits/9999/0000000001",
    "data/README", "data/0000/README", "data/0000/0000000001/evil", "data/9999/0000000001/a-b.delta",
    "init/x", "barriers/x", "barriers/start/.tmp", "strange",
]  # fmt: skip


@pytest.mark.parametrize("key", ODD_KEYS)
def test_keys_of_no_grammar_are_passed_over(two: Two, key: str) -> None:
    two.store.put(key, b"what is this?")
    two.train(8)
    two.world.node("c", ALGORITHM, mailbox=two.box).session.leave()
    two.finish()


class OddListings(MemoryMailbox):
    """Shows what a bucket may hold and no mailbox would write."""

    odd = ["beats//000001", "beats/a b/000001", "beats/ä/000001", "barriers/start/ä", "claims/0000/0000000001/ ", "commits/0000/",
           "commits/0000/0000000001/ä", "commits/0000/x y", "data/0000/0000000001/x y", "learners/a/ 00001", "learners/a/٠00002",
           "rounds/0000/0000000002/", "rounds/0000/0000000002/a b", "rounds/0000/0000000002/ä"]  # fmt: skip

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        odd = [key for key in self.odd if key.startswith(prefix) and key > after]
        return iter(sorted([*super().list(prefix, after=after), *odd]))


@pytest.mark.parametrize("signed", [False, True])
def test_a_listing_may_show_anything(world: Any, signed: bool) -> None:
    two = Two(world, OddListings(), signed=signed)
    two.train(20)
    two.world.node("c", ALGORITHM, mailbox=two.box).session.leave()
    Barrier(two.box, "a", clock=two.a.clock).wait("start", parties=1)
    two.finish()


# --- heartbeats and lives ----------------------------------------------------------------------------


@garbage
def test_beats_that_cannot_be_read_are_silence(two: Two, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    two.store.put(keys.beat("evil", 1), content)
    two.train(4)
    assert "evil" in caplog.text
    assert "evil" not in two.a.session._membership.peers
    two.finish()


@garbage
def test_a_beat_of_a_life_to_come_does_not_hide_the_one_that_is_there(two: Two, content: bytes) -> None:
    two.store.put(keys.beat("b", 2), content)
    two.train(4)
    assert two.a.session._membership.peers["b"].live
    assert two.a.session._membership.peers["b"].generation == 1
    two.finish()


@garbage
def test_a_life_that_cannot_be_read_fences_nobody_and_its_number_is_passed_over(
    two: Two, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    two.store.put(keys.learner("a", 2), content)
    two.train(8)
    assert keys.learner("a", 2) in caplog.text
    two.a.session.close(timeout=120)
    again = two.world.node("a", ALGORITHM, mailbox=two.box)
    assert again.session._membership.life.generation == 3
    two.a = again
    two.finish()


def test_a_life_behind_one_that_cannot_be_read_fences_all_the_same(two: Two) -> None:
    two.store.put(keys.learner("a", 2), b"garbage")
    two.a.tick("heartbeat")
    two.box.put(keys.learner("a", 3), two.box.get(keys.learner("a", 1)) or b"")
    with pytest.raises(Exception, match="newer process"):
        two.a.tick("heartbeat")


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": [9_999_999_999]},
        {"versions": [10**15]},
        {"versions": [10**300]},
        {"versions": [7] * 100_000},
        {"count": 10**18},
        {"count": 10**300},
        {"steps": 10**300, "samples": 10**300, "discarded_steps": 10**300},
        {"uplink": 1e308, "seconds_per_step": 1e308, "seconds": 1e308, "interval": 1e308},
        {"requests": {"x" * 1000: 10**300}},
        {"at": -1e308},
    ],
    ids=lambda changes: str(changes)[:30],
)
def test_absurd_beats_stop_nobody(world: Any, mailbox: MemoryMailbox, changes: dict[str, Any]) -> None:
    two = Two(world, mailbox, signed=False)
    beat = json.loads(encode(Beat(count=1, state="training", versions=(3,)))) | changes
    mailbox.put(keys.beat("evil", 1), json.dumps(beat).encode())
    two.train(8)
    before = two.a.session.versions
    two.train(8)
    assert two.a.session.versions > before
    joiner = world.node("c", ALGORITHM)
    assert joiner.fragment.version >= before[0], "a hint is only a hint"
    joiner.session.leave()
    two.finish()


# --- rounds ------------------------------------------------------------------------------------------


@garbage
def test_records_that_cannot_be_read_are_left_out_and_named(two: Two, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    version = two.open_version
    key = keys.contribution(0, version, "evil")
    two.store.put(key, content)
    two.train_until(version)
    commit = two.a.run.commit(0, version)
    assert commit is not None
    assert [each.learner_id for each in commit.left_out] == ["evil"]
    assert key in commit.left_out[0].reason or key in caplog.text
    two.finish()


def good(two: Two, node: Any, version: int, **changes: Any) -> dict[str, Any]:
    """A sound contribution of ``evil`` to the round that leads to ``version``, changed."""
    tensors = [torch.full((2,), 0.25)]
    data = wire.encode(tensors, node.fragment.specs, "fp32")
    key = keys.data(0, version, "evil", NONCE, "delta")
    two.store.put(key, data)
    record = Contribution(
        nonce=NONCE, learner_id="evil", generation=1, steps=1, samples=1, norms=(tensors[0].norm().item(),), anchor="init",
        data=reference(key, data, wire="fp32"),
    )  # fmt: skip
    found: dict[str, Any] = json.loads(encode(record))
    for path, value in changes.items():
        at = found
        *parents, last = path.split("__")
        for parent in parents:
            at = at[parent]
        at[last] = value
    return found


BAD_RECORDS: dict[str, dict[str, Any]] = {
    "another learner's name": {"learner_id": "a"},
    "another learner's data": {"data__key": "data/0000/0000000001/a-" + NONCE + ".delta"},
    "data outside of its place": {"data__key": "run.json"},
    "data of another fragment": {"data__key": "data/0001/0000000001/evil-" + NONCE + ".delta"},
    "a way out of the mailbox": {"data__key": "data/0000/../../../etc/passwd"},
    "a key that no store can hold": {"data__key": "data/0000/" + "x" * 1000},
    "a key with blanks": {"data__key": "data/0000/a b"},
    "a size beyond the layout": {"data__size": 10**15},
    "a size beyond all bounds": {"data__size": 10**300},
    "another digest": {"data__sha256": "00" * 32},
    "an unknown wire format": {"data__wire": "pickle"},
    "another wire format": {"data__wire": "bf16"},
    "no norms": {"norms": []},
    "too many norms": {"norms": [1.0] * 1000},
    "a wrong norm": {"norms": [7.0]},
    "an infinite norm": {"norms": [1e999]},
    "no steps": {"steps": 0},
    "steps beyond all bounds": {"steps": 10**300},
    "samples beyond all bounds": {"samples": 10**300},
    "a nonce that is a path": {"nonce": "../../x"},
}


@pytest.mark.parametrize("what", BAD_RECORDS)
def test_records_that_do_not_hold_are_left_out_and_named(world: Any, mailbox: MemoryMailbox, what: str) -> None:
    two = Two(world, mailbox, signed=False)
    version = two.open_version
    record = good(two, two.a, version, **BAD_RECORDS[what])
    mailbox.put(keys.contribution(0, version, "evil"), json.dumps(record).encode())
    two.train_until(version)
    commit = two.a.run.commit(0, version)
    assert commit is not None
    assert {each.learner_id for each in commit.left_out} == {"evil"}
    assert all(each.reason for each in commit.left_out)
    assert {each.learner_id for each in commit.merged} <= {"a", "b"}
    two.finish()


def test_a_record_that_holds_is_merged(world: Any, mailbox: MemoryMailbox) -> None:
    """What the cases above have changed makes the difference."""
    two = Two(world, mailbox, signed=False)
    version = two.open_version
    mailbox.put(keys.contribution(0, version, "evil"), json.dumps(good(two, two.a, version)).encode())
    two.train_until(version)
    commit = two.a.run.commit(0, version)
    assert commit is not None
    assert "evil" in {each.learner_id for each in commit.merged}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, 1e30, 1e15])
def test_contributions_that_are_not_finite_or_out_of_all_proportion_are_left_out(world: Any, mailbox: MemoryMailbox, value: float) -> None:
    two = Two(world, mailbox, signed=False)
    version = two.open_version
    tensors = [torch.full((2,), value)]
    data = wire.encode(tensors, two.a.fragment.specs, "fp32")
    key = keys.data(0, version, "evil", NONCE, "delta")
    mailbox.put(key, data)
    norm = tensors[0].double().norm().item()
    norm = norm if abs(norm) < 1e300 else 1.0
    record = Contribution(
        nonce=NONCE, learner_id="evil", generation=1, steps=10**9, samples=10**12, norms=(norm,), anchor="init",
        data=reference(key, data, wire="fp32"),
    )  # fmt: skip
    mailbox.put(keys.contribution(0, version, "evil"), encode(record))
    two.train_until(version)
    commit = two.a.run.commit(0, version)
    assert commit is not None
    assert [each.learner_id for each in commit.left_out] == ["evil"]
    two.finish()
    assert two.a.model.w.abs().max() < 1e3


def test_a_round_far_ahead_holds_up_nobody_who_leaves(two: Two) -> None:
    two.store.put(keys.contribution(0, 9_999_999_999, "evil"), b"garbage")
    two.store.put(keys.contribution(0, two.open_version + 3, "evil"), b"garbage")
    two.train(4)
    two.finish()


@garbage
def test_a_claim_that_cannot_be_read_is_void(two: Two, content: bytes) -> None:
    version = two.open_version
    two.store.put(keys.claim(0, version, 1), content)
    two.train_until(version)
    two.finish()


def test_names_alone_make_no_quorum(world: Any, mailbox: MemoryMailbox) -> None:
    algorithm = DecoupledDiLoCo(sync_every=4, fragments=1, wire="fp32", commit_wire="fp32", grace=0.0, quorum_size=2)
    two = Two(world, mailbox, signed=True, algorithm=algorithm)
    two.settle()
    version = two.open_version
    two.store.put(keys.contribution(0, version, "evil"), b"unsigned")
    for _ in range(20):
        two.a.train(0.5)
        world.turn()
    assert two.a.run.commit(0, version) is None
    two.train_until(version)
    commit = two.a.run.commit(0, version)
    assert commit is not None
    assert {each.learner_id for each in commit.merged} == {"a", "b"}
    assert [each.learner_id for each in commit.left_out] == ["evil"]


# --- a signed run ------------------------------------------------------------------------------------


def unsigned(store: MemoryMailbox, signed: SignedMailbox, key: str, genuine: bytes) -> bytes:
    return genuine


def altered(store: MemoryMailbox, signed: SignedMailbox, key: str, genuine: bytes) -> bytes:
    signed.put(key, genuine)
    sealed = bytearray(store.get(key) or b"")
    sealed[len(sealed) // 2] ^= 1
    return bytes(sealed)


def replayed(store: MemoryMailbox, signed: SignedMailbox, key: str, genuine: bytes) -> bytes:
    signed.put("elsewhere", genuine)
    sealed = store.get("elsewhere") or b""
    store.delete("elsewhere")
    return sealed


def foreign(store: MemoryMailbox, signed: SignedMailbox, key: str, genuine: bytes) -> bytes:
    SignedMailbox(store, "the key of another run").put(key, genuine)
    return store.get(key) or b""


forgeries = pytest.mark.parametrize("forge", [unsigned, altered, replayed, foreign])
Forge = Callable[[MemoryMailbox, SignedMailbox, str, bytes], bytes]


@pytest.fixture
def signed_two(world: Any, mailbox: MemoryMailbox) -> Two:
    return Two(world, mailbox, signed=True)


def put_forged(two: Two, forge: Forge, key: str, genuine: bytes) -> None:
    assert isinstance(two.box, SignedMailbox)
    two.store.put(key, forge(two.store, two.box, key, genuine))


@forgeries
def test_a_forged_contribution_is_left_out(signed_two: Two, forge: Forge) -> None:
    two, version = signed_two, signed_two.open_version
    record = good(two, two.a, version)
    data_key = record["data"]["key"]
    two.box.put(data_key, two.store.get(data_key) or b"")
    put_forged(two, forge, keys.contribution(0, version, "evil"), json.dumps(record).encode())
    two.train_until(version)
    commit = two.a.run.commit(0, version)
    assert commit is not None
    assert [(each.learner_id, "signed" in each.reason) for each in commit.left_out] == [("evil", True)]
    two.finish()


@forgeries
def test_a_contribution_whose_data_is_forged_is_left_out(signed_two: Two, forge: Forge) -> None:
    two, version = signed_two, signed_two.open_version
    record = good(two, two.a, version)
    data_key = record["data"]["key"]
    put_forged(two, forge, data_key, two.store.get(data_key) or b"")
    two.box.put(keys.contribution(0, version, "evil"), json.dumps(record).encode())
    two.train_until(version)
    commit = two.a.run.commit(0, version)
    assert commit is not None
    assert [each.learner_id for each in commit.left_out] == ["evil"]
    assert data_key in commit.left_out[0].reason
    two.finish()


@forgeries
def test_a_forged_beat_is_silence(signed_two: Two, forge: Forge, caplog: pytest.LogCaptureFixture) -> None:
    two = signed_two
    genuine = encode(Beat(count=10**6, state="training", versions=(10**6,)))
    for key in (keys.beat("evil", 1), keys.beat("b", 5)):
        put_forged(two, forge, key, genuine)
    two.train(4)
    assert set(two.a.session._membership.peers) == {"a", "b"}
    assert two.a.session._membership.peers["b"].live
    assert keys.beat("evil", 1) in caplog.text
    two.finish()


@forgeries
def test_a_forged_life_fences_nobody(signed_two: Two, forge: Forge) -> None:
    two = signed_two
    put_forged(two, forge, keys.learner("a", 2), two.box.get(keys.learner("a", 1)) or b"")
    two.train(4)
    two.finish()


@forgeries
def test_a_forged_commit_is_named_and_adopted_by_nobody(signed_two: Two, forge: Forge) -> None:
    """Its place is taken, so nobody can go on; whoever deletes it lets the run go on."""
    two, version = signed_two, signed_two.open_version
    last = two.a.run.commit(0, version - 1)
    assert last is not None
    key = keys.commit(0, version)
    genuine = encode(msgspec.structs.replace(last, version=version, nonce=NONCE))
    put_forged(two, forge, key, genuine)
    with pytest.raises(CorruptObject, match=key):
        two.train_until(version)
    with pytest.raises(CorruptObject, match=f"{key}.*"):
        two.world.node("c", ALGORITHM, mailbox=two.box)
    two.store.delete(key)
    two.train_until(version)
    two.finish()


@forgeries
def test_forged_commits_to_come_are_passed_over_until_their_turn(signed_two: Two, forge: Forge) -> None:
    two, version = signed_two, signed_two.open_version
    last = two.a.run.commit(0, version - 1)
    assert last is not None
    put_forged(two, forge, keys.commit(0, version + 500), encode(msgspec.structs.replace(last, version=version + 500)))
    two.train_until(version)
    two.finish()


@forgeries
def test_a_forged_manifest_is_refused(mailbox: MemoryMailbox, world: Any, forge: Forge) -> None:
    two = Two(world, mailbox, signed=True)
    put_forged(two, forge, keys.RUN, two.box.get(keys.RUN) or b"")
    with pytest.raises(CorruptObject, match=r"run\.json"):
        world.node("c", ALGORITHM, mailbox=two.box)


def test_a_learner_without_the_key_changes_nothing(signed_two: Two) -> None:
    two = signed_two
    with pytest.raises(CorruptObject, match="GRADIENTMAIL_RUN_KEY"):
        two.world.node("c", ALGORITHM, mailbox=two.store)
    two.train(4)
    assert read(two.box, Commit, keys.commit(0, 1)) is not None
    two.finish()
