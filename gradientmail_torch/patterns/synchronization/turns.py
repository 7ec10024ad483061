"""Whose turn it is to run a complete node, so that of many parties that wait few pay for a claim that is refused."""

from __future__ import annotations

from gradientmail_torch.patterns.synchronization.dag import Dag


class Turns:
    """One party's turns.

    Nobody knows who is there to run a node. But each party knows what it has called itself: whoever called last, having
    seen all others before it, goes at once, and so does who called the first predecessor. The others leave it to them
    for one look; with each further look that finds no outcome, ``GROWTH`` times as many go.
    """

    GROWTH = 8

    def __init__(self, dag: Dag) -> None:
        self._dag = dag
        self._rank: dict[str, int] = {}
        self._looks: dict[str, int] = {}

    def called(self, node: str, by: str, *, last: bool) -> None:
        """This party has reached ``node`` as ``by``; ``last``: when all other predecessors had."""
        rank = 0 if last else self._dag.predecessors[node].index(by)
        self._rank[node] = min(rank, self._of(node))

    def is_first(self, node: str) -> bool:
        """Whether the others leave ``node`` to this party at first."""
        return self._of(node) == 0

    def has_come(self, node: str) -> bool:
        """Whether this party may claim ``node``; to be asked once at each look that finds it complete."""
        looks = self._looks.get(node, 0)
        self._looks[node] = looks + 1
        return bool(self._of(node) < self.GROWTH**looks)

    def _of(self, node: str) -> int:
        """Who has called nothing comes after all those who have."""
        return self._rank.get(node, len(self._dag.predecessors[node]))
