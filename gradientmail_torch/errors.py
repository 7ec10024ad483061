"""Every error that this package raises, in one tree.

::

    GradientMailError
    ├── ConfigError (ValueError)            a setting or an argument that cannot be used
    │   └── InvalidName                     a name or key that a mailbox cannot hold
    ├── MailboxError                        the store
    │   ├── MailboxUnavailable              no answer, or "try again": may pass
    │   │   └── OutcomeUnknown              a conditional write whose answer was lost and could not be read back
    │   ├── MailboxDenied                   credentials, permissions, region
    │   ├── MailboxMissing                  the bucket or folder does not exist
    │   └── MailboxUnsupported              the store lacks what the protocol needs
    ├── CorruptObject                       an object that is not what it should be
    ├── RunMismatch                         this model or algorithm is not the run's
    ├── LearnerFenced                       a newer life of this learner ID has taken over
    │   └── LearnerIdInUse                  another process holds this learner ID
    ├── TrainingDiverged                    this learner's steps are not finite any more
    ├── BackgroundFailure                   a background thread of the session failed; its cause is attached
    ├── RunTimeout (TimeoutError)           a stated wait ran out
    │   └── NoTaskServer                    nobody is there to run the tasks that are waited for
    ├── KillSignal                          the task servers of a queue have been told to stop
    ├── ThinkerFailed                       another agent of this Thinker has raised
    ├── WorkFailed                          a function that was run for others raised
    ├── WorkFenced                          another party took this work over
    └── SynchronizationExpired              a fan-in that has been swept away

An error's text names the thing, the place and the cure.
"""


class GradientMailError(Exception):
    """Base of every error of this package."""


class ConfigError(GradientMailError, ValueError):
    """A setting or an argument that cannot be used; the text names it and says what can."""


class InvalidName(ConfigError):
    """A name or key that a mailbox cannot hold."""


class MailboxError(GradientMailError):
    """The store refused or failed an operation."""


class MailboxUnavailable(MailboxError):
    """The store gave no answer or asked to be tried again. The operation may have been carried out."""


class OutcomeUnknown(MailboxUnavailable):
    """A conditional write lost its answer, and the object could not be read back to settle who wrote it."""


class MailboxDenied(MailboxError):
    """Credentials, permissions or region are wrong. Trying again does not help."""


class MailboxMissing(MailboxError):
    """The bucket or the folder does not exist."""


class MailboxUnsupported(MailboxError):
    """The store lacks something the protocol cannot do without, such as an honest conditional create."""


class CorruptObject(GradientMailError):
    """An object in the mailbox is truncated, too large, altered or not of the expected form."""


class RunMismatch(GradientMailError):
    """The mailbox holds a run of another model layout, algorithm or protocol version."""


class LearnerFenced(GradientMailError):
    """A newer life of this learner ID has taken over; this process must stop publishing."""


class LearnerIdInUse(LearnerFenced):
    """Another process that is alive holds this learner ID."""


class TrainingDiverged(GradientMailError):
    """Contribution after contribution of this learner was not finite, and was discarded."""


class BackgroundFailure(GradientMailError):
    """A background thread of the session failed. ``__cause__`` is what it raised."""


class RunTimeout(GradientMailError, TimeoutError):
    """A wait with a stated limit ran out; the text says what it was waiting for."""


class NoTaskServer(RunTimeout):
    """Results are waited for, and no task server has been there for a stated time."""


class KillSignal(GradientMailError):
    """The task servers of this queue have been told to stop."""


class ThinkerFailed(GradientMailError):
    """Another agent of this Thinker has raised, so nobody waits for results any more. ``__cause__`` is what it raised."""


class WorkFailed(GradientMailError):
    """A function that one party ran on behalf of all raised; the text holds its traceback."""


class WorkFenced(GradientMailError):
    """Another party has taken this work over; the result of this attempt was refused."""


class SynchronizationExpired(GradientMailError):
    """A call came after its synchronization run had been swept away."""
