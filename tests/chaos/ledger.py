"""What the commit records say of a run that has ended, beside what its nodes have said."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradientmail_torch import keys
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import Commit
from gradientmail_torch.session.run import INITIAL_NONCE, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeReport:
    """What one process has said."""

    name: str
    generation: int
    steps: int
    """Of which it has told; one more may have been made."""
    samples: int
    stats: dict[str, Any] | None = None
    """What it said at its end, if it has closed its session."""
    digest: str = ""
    """Of its parameters at the end."""


class Ledger:
    def __init__(self, mailbox: Mailbox) -> None:
        run = Run.open(mailbox)
        assert run is not None
        self.fragments = len(run.layout)
        self.commits: list[Commit] = []
        self.problems: list[str] = []
        for fragment in range(self.fragments):
            self._read(run, fragment)
        self.commits.sort(key=lambda commit: commit.at)
        self.merged_steps: Counter[tuple[str, int]] = Counter()
        """Steps that commits hold, once per fragment, by learner and generation."""
        self.merged_samples: Counter[tuple[str, int]] = Counter()
        for commit in self.commits:
            for merged in commit.merged:
                self.merged_steps[merged.learner_id, merged.generation] += merged.steps
                self.merged_samples[merged.learner_id, merged.generation] += merged.samples

    def _read(self, run: Run, fragment: int) -> None:
        versions = [keys.parse_commit(key).version for key in run.mailbox.list(keys.commit_prefix(fragment))]
        if versions != list(range(1, len(versions) + 1)):
            self.problems.append(f"the versions of fragment {fragment} have gaps: {versions}")
        before = INITIAL_NONCE
        merged_in: dict[str, int] = {}
        for version in versions:
            commit = run.committed(fragment, version)
            self.commits.append(commit)
            if commit.after != before:
                self.problems.append(f"fragment {fragment}: version {version} does not follow the version before it: one was created twice")
            before = commit.nonce
            for merged in commit.merged:
                if merged.nonce in merged_in:
                    places = f"versions {merged_in[merged.nonce]} and {version}"
                    self.problems.append(f"fragment {fragment}: a contribution of {merged.learner_id}, {merged.nonce}, is in {places}")
                merged_in[merged.nonce] = version

    @property
    def useful_samples(self) -> float:
        """Samples whose progress is in the model."""
        return sum(self.merged_samples.values()) / self.fragments

    def left_out(self) -> Counter[str]:
        """Contributions that were not merged, by reason."""
        return Counter(each.reason for commit in self.commits for each in commit.left_out)

    def check(self, lives: Sequence[LifeReport]) -> list[str]:
        """What does not hold, in words."""
        problems = list(self.problems)
        known = {(life.name, life.generation) for life in lives}
        for life in self.merged_steps.keys() - known:
            problems.append(f"commits hold {self.merged_steps[life]} steps of {life}, which nobody has made")
        for life in lives:
            problems += self._check_life(life)
        digests: dict[str, list[str]] = defaultdict(list)
        for life in lives:
            if life.digest:
                digests[life.digest].append(life.name)
        if len(digests) > 1:
            problems.append(f"the nodes have ended with {len(digests)} different models: {dict(digests)}")
        return problems

    def _check_life(self, life: LifeReport) -> list[str]:
        who = (life.name, life.generation)
        done = (life.steps + 1) * self.fragments
        if self.merged_steps[who] > done:
            return [f"commits hold {self.merged_steps[who]} steps of {who}, which has made {done}"]
        if life.stats is None:
            return []
        tally = life.stats["tally"]
        merged, discarded = tally["merged_work"], tally["discarded_work"]
        problems = []
        for what, in_commits in (("steps", self.merged_steps[who]), ("samples", self.merged_samples[who])):
            total = life.stats[what]
            if merged[what] != in_commits:
                problems.append(f"commits hold {in_commits} {what} of {who}, which counts {merged[what]} as merged")
            if merged[what] + discarded[what] != total * self.fragments:
                problems.append(
                    f"of {total} {what} of {who} in {self.fragments} fragments, {merged[what]} are merged and {discarded[what]} discarded"
                )
        return problems
