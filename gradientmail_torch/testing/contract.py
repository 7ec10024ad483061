"""What every mailbox promises, as tests. A backend's own tests subclass :class:`MailboxContract`::

    class TestMyMailbox(MailboxContract):
        @pytest.fixture
        def mailbox(self, tmp_path):
            return MyMailbox(tmp_path)

Needs pytest; ``pytest.register_assert_rewrite("gradientmail_torch.testing.contract")`` gives readable failures.
"""

from __future__ import annotations

import io
import itertools
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import TypeVar

import pytest

from gradientmail_torch.errors import InvalidName
from gradientmail_torch.keys import encode_name
from gradientmail_torch.mailbox.base import Mailbox

T = TypeVar("T")

CONTENT = b"0123456789"
WINDOWS = [(0, None), (0, 0), (0, 3), (3, None), (3, 4), (3, 100), (9, 1), (10, None), (10, 5), (20, None), (20, 5), (20, 0)]
# Sorted as bytes, with folders within folders.
KEYS = ["A", "_", "a/b/c", "a/b/d/e", "a/b0", "a/c-", "a/c.", "a/c0", "a0", "ab/c", "b-c", "b.c", "b0", "~"]
PREFIXES = ["", "a", "a/", "a/b", "a/b/", "a/b/d", "a/c", "ab", "a0", "b", "b-", "c", "nothing/here", "~"]
AFTER = ["", *KEYS, "a", "a/", "a/b", "a/b/", "a/b/bb", "a/b/d", "a/b/d/", "a/bb", "ab", "b", "zzz"]
ILLEGAL = ["", "/", "/a", "a/", "a//b", ".", "..", "a/..", "a/../b", "../a", "./a", "a b", "a\\b", "a\n", "ä", "a?b", "a#b", "a\0"]


class MailboxShape:
    """One caller at a time: what each operation does."""

    MANY = 2500
    """Keys of the long listing: more than two pages of 1,000."""

    @pytest.fixture
    def mailbox(self) -> Mailbox:
        raise NotImplementedError("the subclass gives a fixture named 'mailbox' with an empty mailbox")

    # --- get and put ---------------------------------------------------------------------------------

    def test_an_absent_object_is_none(self, mailbox: Mailbox) -> None:
        assert mailbox.get("a/b") is None
        assert mailbox.get("a/b", start=3) is None
        assert mailbox.get("a/b", length=0) is None

    @pytest.mark.parametrize(("start", "length"), WINDOWS)
    def test_a_window_holds_what_the_object_has_there(self, mailbox: Mailbox, start: int, length: int | None) -> None:
        mailbox.put("a", CONTENT)
        mailbox.put("empty", b"")
        end = None if length is None else start + length
        assert mailbox.get("a", start=start, length=length) == CONTENT[start:end]
        assert mailbox.get("empty", start=start, length=length) == b""

    def test_put_replaces(self, mailbox: Mailbox) -> None:
        for body in (CONTENT, b"", b"longer than before"):
            mailbox.put("a/b", body)
            assert mailbox.get("a/b") == body
        assert list(mailbox.list("")) == ["a/b"]

    def test_bodies_may_be_any_bytes_or_a_file_from_its_position_on(self, mailbox: Mailbox) -> None:
        changing = bytearray(CONTENT)
        words = memoryview(bytes(8)).cast("I")
        with tempfile.TemporaryFile() as file:
            file.write(b"skipped" + CONTENT)
            for number, write in enumerate((mailbox.put, mailbox.put_if_absent)):
                file.seek(7)
                write(f"{number}/file", file)
                assert not file.closed
                write(f"{number}/view", memoryview(CONTENT)[2:5])
                write(f"{number}/words", words)
                write(f"{number}/array", changing)
                write(f"{number}/buffer", io.BytesIO(CONTENT))
                changing[:] = b"x" * len(CONTENT)
                assert mailbox.get(f"{number}/file") == CONTENT
                assert mailbox.get(f"{number}/view") == CONTENT[2:5]
                assert mailbox.get(f"{number}/words") == bytes(8)
                assert mailbox.get(f"{number}/array") == CONTENT
                assert mailbox.get(f"{number}/buffer") == CONTENT
                changing[:] = CONTENT

    def test_bodies_may_be_large(self, mailbox: Mailbox) -> None:
        body = bytes(range(256)) * (40 << 12)  # 40 MiB
        with tempfile.TemporaryFile() as file:
            file.write(b"skipped" + body)
            file.seek(7)
            for key, given in (("a/bytes", body), ("a/view", memoryview(body)), ("a/file", file)):
                mailbox.put(key, given)
                assert mailbox.get(key) == body
            assert not file.closed
        assert mailbox.get("a/file", start=len(body) - 3) == body[-3:]
        assert mailbox.get("a/file", start=20 << 20, length=300) == body[:300]

    # --- put_if_absent and delete --------------------------------------------------------------------

    @pytest.mark.parametrize("body", [CONTENT, b""])
    def test_the_first_creates_and_the_second_is_refused(self, mailbox: Mailbox, body: bytes) -> None:
        assert mailbox.put_if_absent("a/b", body)
        assert not mailbox.put_if_absent("a/b", b"other")
        assert not mailbox.put_if_absent("a/b", body)
        assert mailbox.get("a/b") == body

    def test_an_object_that_was_put_cannot_be_created(self, mailbox: Mailbox) -> None:
        mailbox.put("a", CONTENT)
        assert not mailbox.put_if_absent("a", b"other")
        assert mailbox.get("a") == CONTENT

    def test_delete_removes_one_object_and_may_be_repeated(self, mailbox: Mailbox) -> None:
        mailbox.put("a/b", CONTENT)
        mailbox.put("a/c", CONTENT)
        for _ in range(2):
            mailbox.delete("a/b")
            assert mailbox.get("a/b") is None
        assert list(mailbox.list("")) == ["a/c"]
        mailbox.delete("never/there")
        assert mailbox.put_if_absent("a/b", b"again")
        assert mailbox.get("a/b") == b"again"

    # --- list ----------------------------------------------------------------------------------------

    def test_an_empty_mailbox_lists_nothing(self, mailbox: Mailbox) -> None:
        assert list(mailbox.list("")) == []
        assert list(mailbox.list("a/")) == []

    def test_listings_are_in_the_order_of_bytes_and_begin_behind_after(self, mailbox: Mailbox) -> None:
        for key in reversed(KEYS):
            mailbox.put(key, b"")
        for prefix, after in itertools.product(PREFIXES, AFTER):
            expected = [key for key in KEYS if key.startswith(prefix) and key > after]
            assert list(mailbox.list(prefix, after=after)) == expected, f"prefix {prefix!r} after {after!r}"

    def test_a_listing_is_whole_where_a_folders_name_begins_its_neighbours(self, mailbox: Mailbox) -> None:
        keys = ["a-b", "a.b/c", "a/b", "a/c-d/e", "a/c/f", "a0/b"]
        for key in keys:
            mailbox.put(key, b"")
        assert sorted(mailbox.list("")) == keys
        assert sorted(mailbox.list("a")) == keys
        assert sorted(mailbox.list("a/")) == ["a/b", "a/c-d/e", "a/c/f"]

    def test_a_long_listing_is_whole(self, mailbox: Mailbox) -> None:
        keys = [f"many/{number:06d}" for number in range(self.MANY)]
        together(keys, lambda key: mailbox.put(key, b""))
        assert list(mailbox.list("many/")) == keys
        assert list(mailbox.list("many/", after=keys[self.MANY // 3])) == keys[self.MANY // 3 + 1 :]
        assert list(itertools.islice(mailbox.list("many/"), 5)) == keys[:5]
        assert list(mailbox.list("many/0000")) == keys[:100]

    # --- keys ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", ["a/b", "../a", ".", "100 %", "ä ö", "a+b&c=d", "%2F", "~"])
    def test_any_encoded_name_is_kept_as_it_is(self, mailbox: Mailbox, name: str) -> None:
        key = f"named/{encode_name(name)}"
        assert mailbox.put_if_absent(key, CONTENT)
        assert mailbox.get(key) == CONTENT
        assert list(mailbox.list("named/")) == [key]
        assert list(mailbox.list(key)) == [key]
        mailbox.delete(key)
        assert list(mailbox.list("")) == []

    def test_long_keys_are_kept(self, mailbox: Mailbox) -> None:
        key = "/".join(["x" * 200] * 4)
        mailbox.put(key, CONTENT)
        assert mailbox.get(key) == CONTENT
        assert list(mailbox.list(key[:300])) == [key]

    @pytest.mark.parametrize("key", ILLEGAL)
    def test_an_illegal_key_is_refused_by_every_operation(self, mailbox: Mailbox, key: str) -> None:
        operations: list[Callable[[], object]] = [
            lambda: mailbox.get(key),
            lambda: mailbox.get(key, length=0),
            lambda: mailbox.put(key, CONTENT),
            lambda: mailbox.put_if_absent(key, CONTENT),
            lambda: mailbox.delete(key),
        ]
        for operation in operations:
            with pytest.raises(InvalidName, match="mailbox key"):
                operation()
        assert list(mailbox.list("")) == []


class MailboxContract(MailboxShape):
    """All that a mailbox promises: the shape, and what holds when many use it at once."""

    RACERS = 16
    RACES = 20

    def test_of_many_that_create_one_key_at_once_exactly_one_wins(self, mailbox: Mailbox) -> None:
        ready = Barrier(self.RACERS)

        def race(racer: int) -> list[bool]:
            won = []
            for number in range(self.RACES):
                ready.wait()
                won.append(mailbox.put_if_absent(f"race/{number}", f"racer {racer}".encode()))
            return won

        won = together(range(self.RACERS), race)
        for number in range(self.RACES):
            winners = [racer for racer in range(self.RACERS) if won[racer][number]]
            assert len(winners) == 1, f"race {number} was won by {winners}"
            assert mailbox.get(f"race/{number}") == f"racer {winners[0]}".encode()

    def test_readers_never_see_half_an_object(self, mailbox: Mailbox) -> None:
        bodies = [bytes([number]) * (1 << 20) for number in range(4)]
        mailbox.put("shared", bodies[0])
        done = Event()

        def write(number: int) -> None:
            for body in bodies[number::2] * 5:
                mailbox.put("shared", body)

        def read(_: int) -> set[bytes]:
            seen = set()
            while not done.is_set():
                found = mailbox.get("shared")
                assert found is not None
                seen.add(found)
            return seen

        with ThreadPoolExecutor(2) as readers:
            reading = [readers.submit(read, number) for number in range(2)]
            try:
                together(range(2), write)
            finally:
                done.set()
        assert set.union(*(future.result() for future in reading)) <= set(bodies)

    def test_a_listing_holds_every_object_that_was_there_before_and_stays(self, mailbox: Mailbox) -> None:
        staying = [f"mixed/{number:04d}-stays" for number in range(50)]
        together(staying, lambda key: mailbox.put(key, b""))

        def come_and_go(number: int) -> None:
            for _ in range(20):
                mailbox.put(f"mixed/{number:04d}-comes", b"")
                mailbox.delete(f"mixed/{number:04d}-comes")

        def look(_: int) -> None:
            for _ in range(10):
                seen = list(mailbox.list("mixed/"))
                assert [key for key in seen if key.endswith("stays")] == staying
                assert seen == sorted(set(seen))

        together(range(8), lambda number: look(number) if number % 2 else come_and_go(number))


S = TypeVar("S")


def together(items: Iterable[S], function: Callable[[S], T]) -> list[T]:
    """``function`` of each item, in threads of its own (at most 16); the first failure is raised."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(function, items))
