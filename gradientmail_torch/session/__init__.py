"""A learner's part in a run: joining, publishing, aligning, merging, leaving."""

from gradientmail_torch.session.alignment import align
from gradientmail_torch.session.joining import Joining
from gradientmail_torch.session.session import Session, Stats
from gradientmail_torch.session.settings import Settings

__all__ = ["Joining", "Session", "Settings", "Stats", "align"]
