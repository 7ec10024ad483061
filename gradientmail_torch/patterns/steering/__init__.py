"""Steering: a Thinker decides which computations to run, task servers ("Doers") run them wherever there is a node.

The names and the message format are Colmena's (0.7).
"""

from gradientmail_torch.patterns.steering.agents import agent, event_responder, result_processor, task_submitter
from gradientmail_torch.patterns.steering.queues.base import ServerInfo, TaskQueues
from gradientmail_torch.patterns.steering.queues.mailbox import MailboxQueues
from gradientmail_torch.patterns.steering.queues.pipes import PipeQueues
from gradientmail_torch.patterns.steering.queues.redis import RedisQueue, RedisQueues
from gradientmail_torch.patterns.steering.report import overhead_summary, overhead_table, plot_overhead
from gradientmail_torch.patterns.steering.resources import ResourceCounter
from gradientmail_torch.patterns.steering.result import FailureInformation, ResourceRequirements, Result
from gradientmail_torch.patterns.steering.servers.local import LocalTaskServer
from gradientmail_torch.patterns.steering.servers.mailbox import MailboxTaskServer
from gradientmail_torch.patterns.steering.servers.parsl import ParslTaskServer
from gradientmail_torch.patterns.steering.thinker import BaseThinker
from gradientmail_torch.patterns.steering.wire import result_from_json

__all__ = [
    "BaseThinker",
    "FailureInformation",
    "LocalTaskServer",
    "MailboxQueues",
    "MailboxTaskServer",
    "ParslTaskServer",
    "PipeQueues",
    "RedisQueue",
    "RedisQueues",
    "ResourceCounter",
    "ResourceRequirements",
    "Result",
    "ServerInfo",
    "TaskQueues",
    "agent",
    "event_responder",
    "overhead_summary",
    "overhead_table",
    "plot_overhead",
    "result_from_json",
    "result_processor",
    "task_submitter",
]
