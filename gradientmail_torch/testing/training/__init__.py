"""Whole trainings under the deterministic simulation: the real session, its patterns, and every invariant of a run.

::

    simulate(seed)      # raises a Violation, with a trace, where one does not hold

``python -m gradientmail_torch.testing.explore --seeds 2000`` goes through many.
"""

from gradientmail_torch.testing.training.scenario import Scenario
from gradientmail_torch.testing.training.violations import Invariant, Violation
from gradientmail_torch.testing.training.world import World, simulate

__all__ = ["Invariant", "Scenario", "Violation", "World", "simulate"]
