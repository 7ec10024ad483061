"""Real processes, killed and suspended at exact operations: the others go on and nothing committed is lost."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gradientmail_torch import keys
from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.mailbox import Mailbox, open_mailbox
from gradientmail_torch.messages import Commit, Contribution, read

LIMIT_S = 40.0
DELTA, RECORD = r"put data/.*\.delta", r"put_if_absent rounds/.*"
MERGED_DATA, COMMIT = r"put data/.*\.(update|whole)", r"put_if_absent commits/.*"


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something that another process does."""
    deadline = SYSTEM_CLOCK.monotonic() + LIMIT_S
    while not condition():
        assert SYSTEM_CLOCK.monotonic() < deadline, f"{what} never came"
        SYSTEM_CLOCK.sleep(0.01)


@dataclass
class Life:
    """A process that is one life of a learner."""

    pid: int
    pidfd: int
    result_at: Path
    config: dict[str, Any]

    def wait(self) -> None:
        """Until the process is gone."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        assert poll.poll(LIMIT_S * 1000), f"{self.config['learner_id']} hangs"

    def result(self) -> dict[str, Any]:
        self.wait()
        assert self.result_at.exists(), f"{self.config['learner_id']} was killed"
        found: dict[str, Any] = json.loads(self.result_at.read_text())
        return found

    def killed(self) -> bool:
        self.wait()
        return not self.result_at.exists()

    def suspended(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except FileNotFoundError:
            raise AssertionError(f"{self.config['learner_id']} has met no fate") from None

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@dataclass
class Nursery:
    process: subprocess.Popen[str]
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    url: str = ""
    lives: list[Life] = field(default_factory=list)

    def learner(self, learner_id: str, *, fate: dict[str, Any] | None = None, steps: int = 18, parties: int = 2, **algorithm: Any) -> Life:
        result = self.folder / f"{len(self.lives)}.json"
        config = {
            "url": self.url,
            "env": self.env,
            "learner_id": learner_id,
            "steps": steps,
            "parties": parties,
            "fate": fate,
            "algorithm": algorithm,
            "result": str(result),
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(config) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        self.lives.append(Life(pid, os.pidfd_open(pid), result, config))
        return self.lives[-1]

    def again(self, life: Life) -> Life:
        """A new life of the same learner, without its fate."""
        config = life.config
        return self.learner(config["learner_id"], steps=config["steps"], parties=config["parties"], **config["algorithm"])

    @property
    def mailbox(self) -> Mailbox:
        return open_mailbox(self.url)


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).parent / "nursery.py"
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdin is not None
        assert started.stdout.readline() == "ready\n"
        yield started
        started.stdin.close()


@pytest.fixture
def nursery(process: subprocess.Popen[str], tmp_path: Path) -> Iterator[Nursery]:
    """Learners who share a directory."""
    nursery = Nursery(process, tmp_path, url=(tmp_path / "mailbox").as_uri())
    yield nursery
    for life in nursery.lives:
        try:
            signal.pidfd_send_signal(life.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.close(life.pidfd)


def fate(at: str, when: str = "before", *, number: int = 1, what: str = "SIGKILL") -> dict[str, Any]:
    return {"at": at, "when": when, "number": number, "signal": what}


def commits(mailbox: Mailbox) -> dict[str, bytes | None]:
    return {key: mailbox.get(key) for key in mailbox.list("commits/")}


def check(nursery: Nursery, before: dict[str, bytes | None], *lives: Life) -> None:
    """All have the same bits, did what they said, and what was committed ``before`` still is."""
    results = [life.result() for life in lives]
    for life, result in zip(lives, results, strict=True):
        assert "error" not in result, f"{life.config['learner_id']}: {result['traceback']}"
        assert result["merged"] == result["done"]
        assert result["discarded"] == 0
    assert len({result["hash"] for result in results}) == 1
    after = commits(nursery.mailbox)
    assert before.items() <= after.items(), "a committed round was lost"
    for fragment in (0, 1):
        versions = [keys.parse_round(key).version for key in after if keys.parse_round(key).fragment == fragment]
        assert versions == list(range(1, len(versions) + 1))
    records = [read(nursery.mailbox, Commit, key) for key in after]
    nonces = [merged.nonce for record in records if record for merged in record.merged]
    assert len(nonces) == len(set(nonces)), "a contribution was merged twice"


KILLS = {
    "before a contribution's data": fate(DELTA),
    "between a contribution's data and its record": fate(RECORD),
    "after a contribution's record": fate(RECORD, "after", number=2),
    "when it has claimed a round": fate(MERGED_DATA),
    "between a commit's data and its record": fate(COMMIT),
    "after a commit": fate(COMMIT, "after"),
}


@pytest.mark.parametrize("when", KILLS)
def test_a_learner_that_is_killed_stops_nobody_and_comes_back(nursery: Nursery, when: str) -> None:
    survivor, victim = nursery.learner("survivor"), nursery.learner("victim", fate=KILLS[when])
    assert victim.killed()
    before = commits(nursery.mailbox)
    again = nursery.again(victim)
    check(nursery, before, survivor, again)
    assert again.result()["generation"] == 2


@pytest.mark.s3
@pytest.mark.parametrize("when", ["between a commit's data and its record"])
def test_the_same_over_a_real_s3_server(nursery: Nursery, s3_url: str, when: str) -> None:
    nursery.url = s3_url
    nursery.env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    survivor, victim = nursery.learner("survivor", steps=8), nursery.learner("victim", steps=8, fate=KILLS[when])
    assert victim.killed()
    before = commits(nursery.mailbox)
    check(nursery, before, survivor, nursery.again(victim))


def test_of_three_two_go_on_when_one_is_gone_for_good(nursery: Nursery) -> None:
    survivors = [nursery.learner(f"survivor-{i}", parties=3, steps=36) for i in range(2)]
    victim = nursery.learner("victim", parties=3, steps=36, fate=fate(MERGED_DATA))
    assert victim.killed()
    before = commits(nursery.mailbox)
    nursery.mailbox.put(keys.barrier("done", "victim"), b"{}")  # nobody waits for it any more
    check(nursery, before, *survivors)


def test_a_recorded_contribution_counts_though_its_learner_is_dead(nursery: Nursery) -> None:
    """The quorum needs it, so no commit can have passed it by."""
    settings = {"quorum_size": 2, "fragments": 1}
    survivor = nursery.learner("survivor", **settings)
    victim = nursery.learner("victim", fate=fate(RECORD, "after"), **settings)
    assert victim.killed()
    record = read(nursery.mailbox, Contribution, keys.contribution(0, 1, "victim"))
    assert record is not None
    until(lambda: nursery.mailbox.get(keys.commit(0, 1)), "the commit")
    commit = read(nursery.mailbox, Commit, keys.commit(0, 1))
    assert commit is not None
    assert record.nonce in {merged.nonce for merged in commit.merged}
    check(nursery, {}, survivor, nursery.again(victim))


def test_a_founder_that_is_killed_before_the_manifest_leaves_no_run_behind(nursery: Nursery) -> None:
    victim = nursery.learner("victim", fate=fate(r"put_if_absent run\.json"))
    assert victim.killed()
    assert nursery.mailbox.get(keys.RUN) is None
    lives = [nursery.again(victim), nursery.learner("other")]
    check(nursery, {}, *lives)


def test_a_sleeper_that_wakes_after_the_takeover_adopts_what_the_others_have_committed(nursery: Nursery) -> None:
    settings = {"parties": 3, "steps": 60, "quorum_size": 3, "fragments": 1}  # so that the others cannot go on without this round
    others = [nursery.learner(f"other-{i}", **settings) for i in range(2)]
    sleeper = nursery.learner("sleeper", fate=fate(COMMIT, what="SIGSTOP"), **settings)
    until(sleeper.suspended, "the suspension")
    before = commits(nursery.mailbox)
    until(lambda: takeover(nursery.mailbox), "the takeover")
    sleeper.wake()
    check(nursery, before, *others, sleeper)
    assert sleeper.result()["generation"] == 1


def takeover(mailbox: Mailbox) -> bool:
    """Whether a round that the sleeper had claimed has been committed by another."""
    for key in mailbox.list("claims/"):
        fragment, version, attempt = keys.parse_round(key)
        if int(attempt) == 2:
            return mailbox.get(keys.commit(fragment, version)) is not None
    return False


def test_a_sleeper_whose_id_has_a_new_life_is_fenced_when_it_wakes(nursery: Nursery) -> None:
    other, sleeper = nursery.learner("other"), nursery.learner("sleeper", fate=fate(COMMIT, what="SIGSTOP"))
    until(sleeper.suspended, "the suspension")
    again = nursery.again(sleeper)  # a supervisor that has lost patience
    until(lambda: nursery.mailbox.get(keys.beat("sleeper", 2)), "the new life")
    before = commits(nursery.mailbox)
    sleeper.wake()
    assert sleeper.result()["error"] == "LearnerFenced"
    check(nursery, before, other, again)
    assert again.result()["generation"] == 2
