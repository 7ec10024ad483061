"""A signed mailbox: what is not written with the run's key, for this name, whole, is refused."""

from __future__ import annotations

from io import BytesIO

import pytest

from gradientmail_torch.errors import ConfigError, CorruptObject
from gradientmail_torch.mailbox import SignedMailbox, open_mailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.mailbox.signed import CHUNK_BYTES
from gradientmail_torch.messages import Beat, read
from gradientmail_torch.patterns.barrier import Barrier
from gradientmail_torch.testing.contract import MailboxContract

KEY = "a secret of the run, long enough"
THREE_CHUNKS = bytes(range(256)) * (2 * CHUNK_BYTES // 256) + b"tail"


class TestSignedMailboxKeepsTheContract(MailboxContract):
    @pytest.fixture
    def mailbox(self) -> SignedMailbox:
        return SignedMailbox(MemoryMailbox(), KEY)


@pytest.fixture
def store() -> MemoryMailbox:
    return MemoryMailbox()


@pytest.fixture
def signed(store: MemoryMailbox) -> SignedMailbox:
    return SignedMailbox(store, KEY)


@pytest.mark.parametrize("content", [b"", b"x", bytes(CHUNK_BYTES), THREE_CHUNKS], ids=["empty", "small", "one full chunk", "three chunks"])
def test_any_part_of_an_object_can_be_read_alone(signed: SignedMailbox, content: bytes) -> None:
    signed.put("a", BytesIO(content))
    assert signed.get("a") == content
    for start in (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, len(content), len(content) + 5, 5 * CHUNK_BYTES):
        for length in (0, 1, 7, CHUNK_BYTES, len(content) + 1, None):
            expected = content[start:] if length is None else content[start : start + length]
            assert signed.get("a", start=start, length=length) == expected


@pytest.mark.parametrize("place", [0, 4, 100, CHUNK_BYTES + 50, -1, -33])
def test_a_changed_bit_is_refused(store: MemoryMailbox, signed: SignedMailbox, place: int) -> None:
    signed.put("a", THREE_CHUNKS)
    raw = bytearray(store.get("a") or b"")
    raw[place] ^= 1
    store.put("a", raw)
    with pytest.raises(CorruptObject, match="'a'"):
        signed.get("a")


@pytest.mark.parametrize("cut", [1, 40, CHUNK_BYTES, CHUNK_BYTES + 33, 2 * (CHUNK_BYTES + 33) + 37 - 4])
def test_a_cut_off_object_is_refused_also_by_a_reader_of_its_end(store: MemoryMailbox, signed: SignedMailbox, cut: int) -> None:
    signed.put("a", THREE_CHUNKS)
    raw = store.get("a") or b""
    store.put("a", raw[: len(raw) - cut])
    with pytest.raises(CorruptObject):
        signed.get("a")
    with pytest.raises(CorruptObject):
        signed.get("a", start=2 * CHUNK_BYTES)


def test_unsigned_objects_and_those_of_another_key_are_refused(store: MemoryMailbox, signed: SignedMailbox) -> None:
    store.put("plain", b"{}")
    SignedMailbox(store, KEY + "!").put("foreign", b"{}")
    for name in ("plain", "foreign"):
        with pytest.raises(CorruptObject, match=name):
            signed.get(name)


def test_an_object_copied_under_another_name_is_refused(store: MemoryMailbox, signed: SignedMailbox) -> None:
    signed.put("commits/0000/0000000001", b"first")
    store.put("commits/0000/0000000002", store.get("commits/0000/0000000001") or b"")
    with pytest.raises(CorruptObject, match="copied"):
        signed.get("commits/0000/0000000002")


def test_a_forged_arrival_opens_no_barrier(store: MemoryMailbox, signed: SignedMailbox) -> None:
    store.put("barriers/start/forged", b"forged")
    with pytest.raises(TimeoutError, match="1 of 2"):
        Barrier(signed, "node-0", poll_interval=0.01).wait("start", parties=2, timeout=0)
    Barrier(signed, "node-1", poll_interval=0.01).wait("start", parties=2)


def test_a_forged_arrival_in_ones_own_name_does_not_keep_one_out(
    store: MemoryMailbox, signed: SignedMailbox, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("barriers/start/node-0", b"forged")
    assert Barrier(signed, "node-0", poll_interval=0.01).wait("start", parties=1, timeout=0) == ["node-0"]
    assert "barriers/start/node-0" in caplog.text
    assert signed.get("barriers/start/node-0") == b"1"


def test_a_learner_without_the_key_is_told_so(store: MemoryMailbox, signed: SignedMailbox) -> None:
    signed.put("beats/a/000001", b"{}")
    with pytest.raises(CorruptObject, match="GRADIENTMAIL_RUN_KEY"):
        read(store, Beat, "beats/a/000001")


def test_the_key_comes_from_the_environment_and_never_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("GRADIENTMAIL_RUN_KEY", KEY)
    mailbox = open_mailbox(str(tmp_path))
    assert isinstance(mailbox, SignedMailbox)
    assert KEY not in repr(mailbox) + repr(vars(mailbox))


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="run_key"):
        SignedMailbox(MemoryMailbox(), "short")
