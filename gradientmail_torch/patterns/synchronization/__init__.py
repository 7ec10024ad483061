"""Fan-in points and the workflows made of them (seed document "Synchronization Node" of Caribou)."""

from gradientmail_torch.patterns.synchronization.dag import Trigger
from gradientmail_torch.patterns.synchronization.ledger import Call
from gradientmail_torch.patterns.synchronization.node import SynchronizationNode
from gradientmail_torch.patterns.synchronization.payload import StoredFile
from gradientmail_torch.patterns.synchronization.runner import Invocation, Result
from gradientmail_torch.patterns.synchronization.sweep import sweep
from gradientmail_torch.patterns.synchronization.workflow import Workflow

__all__ = ["Call", "Invocation", "Result", "StoredFile", "SynchronizationNode", "Trigger", "Workflow", "sweep"]
