"""The records of a run: small, immutable, JSON, decoded strictly.

What comes from a mailbox is untrusted. A record is read with a bound on its length, must be of exactly the
form below, and is never unpickled or evaluated. Tensors are objects of their own (safetensors) that a record
names by key, length and digest.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, ClassVar, Literal, Protocol, TypeVar

import msgspec

from gradientmail_torch.errors import CorruptObject, InvalidName, RunMismatch

PROTOCOL = 1
MAX_RECORD_BYTES = 16 << 20
SIGNED_MARK = b"GMS1"
"""What an object of a signed run begins with; see :mod:`gradientmail_torch.mailbox.signed`."""

MAX_COUNT = 2**53
MAX_SECONDS = 1e30
"""A sum of times beyond it is cut off there: infinity cannot be written."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
MAX_VERSION = 9_999_999_999
"""As many as sort in a listing."""
Version = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Nonce = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{8,64}$")]
Finite = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]

MAX_STEPS = 10**9
MAX_SAMPLES = 10**12
"""Bounds on a contribution, so that every weight is sound in fp32 and can be written into a commit."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Base of all records. Unknown fields are ignored, so that a later minor version can add some."""

    max_bytes: ClassVar[int] = MAX_RECORD_BYTES
    """The longest that one may be; kinds that everyone reads often have less."""


class TensorSpec(Record, frozen=True, kw_only=True):
    """One tensor of the model, as all learners agree on it."""

    name: Name
    shape: tuple[Count, ...]
    """With an extent of 2 at the end where the founder's was complex: it travels as pairs of real numbers."""
    dtype: str
    """As the founder held it, e.g. ``float32``. Learners may hold other floating-point types."""
    kind: Literal["parameter", "buffer"] = "parameter"
    embedding: bool = False
    """Merged by the plain weighted mean: deltas of embedding tables are not near-orthogonal (arXiv 2604.21428)."""

    @property
    def numel(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    @property
    def floating(self) -> bool:
        return "float" in self.dtype or self.complex

    @property
    def complex(self) -> bool:
        return "complex" in self.dtype


class DataRef(Record, frozen=True, kw_only=True):
    """An object that holds tensors."""

    key: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    size: Count
    """Bytes."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    wire: str = "fp32"
    """The wire format; see :mod:`gradientmail_torch.algorithms.wire`."""


class Manifest(Record, frozen=True, kw_only=True):
    """``run.json``: what every learner of a run must agree on. Created once, by the founder."""

    protocol: int
    nonce: Nonce
    """Names the founder's initial parameters."""
    founder: Name
    founded_at: float
    """Seconds since 1970 by the founder's clock; for people."""
    layout: tuple[tuple[TensorSpec, ...], ...]
    """The tensors of each fragment."""
    initial: tuple[DataRef, ...]
    """The initial value of each fragment."""
    algorithm: dict[str, str | int | float | bool | None]
    """The settings that all learners must share."""
    frozen: str = ""
    """Digest of the parameters that do not travel, as the founder held them; empty where it is not known."""


class LifeRecord(Record, frozen=True, kw_only=True):
    """Who one life of a learner ID is."""

    max_bytes: ClassVar[int] = 64 << 10
    nonce: Nonce
    host: str
    machine: str = ""
    """Names the machine and its process table, so that a restart on it need not wait for the old lease."""
    pid: Count
    started_at: float


LearnerState = Literal["joining", "training", "waiting", "leaving", "ended"]


class Earlier(Record, frozen=True, kw_only=True):
    """What the earlier lives of a learner have asked of its store, as far as it is known."""

    lives: Count = 0
    """How many are counted here. One that ended before its first beat is not."""
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    requests: dict[str, Count] = {}
    bytes_up: Count = 0
    bytes_down: Count = 0


class Beat(Record, frozen=True, kw_only=True):
    """A heartbeat, overwritten by its owner alone."""

    max_bytes: ClassVar[int] = 1 << 20
    count: Count
    """Grows with every beat: a beat is new when this has changed."""
    state: LearnerState
    steps: Count = 0
    samples: Count = 0
    seconds_per_step: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    uplink: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Measured upload rate in bytes per second; 0 when not known yet."""
    versions: tuple[Version, ...] = ()
    """The newest version of each fragment that this learner knows."""
    at: float = 0.0
    """Seconds since 1970 by this learner's clock; for people, never compared."""
    interval: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Seconds between two beats; 0 when not said. All from here on is for those who watch a run."""
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """How long this life has lasted, by its own clock."""
    stall_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Time that its training thread has lost to the session."""
    staleness_steps: Count = 0
    """Own steps on the oldest base that has something newer on its way."""
    discarded_steps: Count = 0
    """Own steps that are in no commit and never will be, once per fragment."""
    requests: dict[str, Count] = {}
    """Requests to the mailbox by operation, as a store bills them."""
    bytes_up: Count = 0
    bytes_down: Count = 0
    earlier: Earlier = Earlier()
    """Taken over from the last beat of the life before."""


class Contribution(Record, frozen=True, kw_only=True):
    """A learner's progress on one fragment since its anchor."""

    nonce: Nonce
    learner_id: Name
    generation: Count
    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)]
    samples: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]
    norms: tuple[Annotated[float, msgspec.Meta(ge=0)], ...]
    """L2 norm of each tensor's delta, in layout order; 0 for buffers."""
    anchor: str
    """Nonce of the commit that the progress is counted from (``init`` before the first)."""
    data: DataRef

    @property
    def weight(self) -> float:
        """samples × (samples / steps): quantity × batch size (arXiv 2604.21428)."""
        return self.samples * (self.samples / self.steps)


class Claim(Record, frozen=True, kw_only=True):
    max_bytes: ClassVar[int] = 64 << 10
    nonce: Nonce
    learner_id: Name
    generation: Count


class Merged(Record, frozen=True, kw_only=True):
    """A contribution that a commit holds."""

    nonce: Nonce
    learner_id: Name
    generation: Count
    steps: Count
    samples: Count
    weight: Finite
    data: DataRef
    clips: dict[Count, Annotated[float, msgspec.Meta(ge=0, le=1)]] = {}
    """Factor by which a tensor's delta was shortened, by the tensor's place in the layout."""
    anchor: str = ""
    """Nonce of the commit that the progress was counted from (``init`` before the first); empty when not said."""


class LeftOut(Record, frozen=True, kw_only=True):
    """A contribution that was seen and not merged."""

    nonce: str
    learner_id: Name
    reason: str
    """``missing`` when its data object was gone; otherwise what was wrong with it."""

    @property
    def retry(self) -> bool:
        """Whether the learner still holds sound progress that it may offer again."""
        return self.reason == "missing"


class Partial(Record, frozen=True, kw_only=True):
    """The contributions of one group of a round, summed ahead of the merge. Created once, by one of the group."""

    nonce: Nonce
    fragment: Count
    version: Version
    group: Count
    by: Name
    generation: Count
    method: str
    merged: Annotated[tuple[Merged, ...], msgspec.Meta(min_length=1)]
    """In the order in which they were summed."""
    left_out: tuple[LeftOut, ...] = ()
    """What the syncer is to look at itself."""
    radii: tuple[Annotated[float, msgspec.Meta(ge=0, le=1e30)], ...]
    """See :class:`~gradientmail_torch.algorithms.merge.Sums`."""
    data: DataRef
    """The sums, in fp32."""


class SummedAhead(Record, frozen=True, kw_only=True):
    """Contributions of a commit that were summed ahead: so many of those it names, in their order."""

    contributions: Annotated[int, msgspec.Meta(ge=1)]
    by: Name
    data: DataRef
    """Goes with the commit; what it held can be made again from the contributions."""


class Commit(Record, frozen=True, kw_only=True):
    """THE value of a fragment at a version. Created once and never deleted."""

    nonce: Nonce
    fragment: Count
    version: Annotated[int, msgspec.Meta(ge=1, le=MAX_VERSION)]
    by: Name
    generation: Count
    after: str = ""
    """Nonce of the commit before (``init`` before the first), so that one which was deleted and made again is noticed."""
    update: DataRef | None = None
    """What is added to the version before, in a wire format of few bits: all add the same, so that bits agree."""
    parameters: DataRef | None = None
    """The whole fragment in fp32; in every commit, or where updates are sent, in some. One of the two is there."""
    whole: DataRef | None = None
    """The whole fragment in fp32 where the commit does not wait for it: written afterwards, or never, if its author died."""
    outer: DataRef | None = None
    """State of the outer optimizer after this commit; none where it has none."""
    method: str = "mean"
    """How the contributions were merged: ``mean`` or ``rda``."""
    merged: tuple[Merged, ...] = ()
    """In the order in which they were summed."""
    ahead: tuple[SummedAhead, ...] = ()
    """The first of ``merged`` came in these sums, one after the other; the syncer has read the others itself."""
    left_out: tuple[LeftOut, ...] = ()
    at: float = 0.0
    """Seconds since 1970 by the syncer's clock; for people."""


R = TypeVar("R", bound=Record)


class Readable(Protocol):
    """The part of a mailbox that reading a record takes."""

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None: ...


def writable(text: str) -> str:
    """``text`` as a record can hold it: bytes that are no text, as Python keeps them in names of files, become escapes."""
    return text.encode(errors="backslashreplace").decode()


def encode(record: Record) -> bytes:
    return msgspec.json.encode(record)


def decode(kind: type[R], data: bytes, *, key: str) -> R:
    """The record in ``data``; raises :class:`CorruptObject` naming ``key`` when it is not a ``kind``."""
    if data.startswith(SIGNED_MARK):
        raise CorruptObject(f"{key!r} is signed: set GRADIENTMAIL_RUN_KEY to the run's key, as on the other nodes")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptObject(f"{key!r} is not a {kind.__name__}: {error}") from error


def read(mailbox: Readable, kind: type[R], key: str) -> R | None:
    """The record at ``key``, None when there is none. Raises :class:`CorruptObject`."""
    limit = min(kind.max_bytes, MAX_RECORD_BYTES)
    data = mailbox.get(key, length=limit + 1)
    if data is None:
        return None
    if len(data) > limit:
        raise CorruptObject(f"{key!r} is longer than the {limit} bytes that a {kind.__name__} may have")
    return decode(kind, data, key=key)


def reference(key: str, data: bytes, *, wire: str) -> DataRef:
    return DataRef(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest(), wire=wire)


def read_data(mailbox: Readable, ref: DataRef, *, limit_bytes: int) -> bytes | None:
    """The bytes that ``ref`` names, None when gone. Refuses what is too large before reading it."""
    if ref.size > limit_bytes:
        raise CorruptObject(f"{ref.key!r} claims {ref.size} bytes, more than the {limit_bytes} that its layout allows")
    try:
        data = mailbox.get(ref.key, length=ref.size + 1)
    except InvalidName as error:
        raise CorruptObject(f"data is said to be where no store can hold it: {error}") from error
    if data is None:
        return None
    if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
        raise CorruptObject(f"{ref.key!r} is not the object that was recorded: its length or digest differs")
    return data


def check_manifest(manifest: Manifest) -> None:
    if manifest.protocol != PROTOCOL:
        raise RunMismatch(
            f"the run was founded with protocol {manifest.protocol}, this package speaks {PROTOCOL}: install the version that founded it"
        )
    if not manifest.layout or len(manifest.initial) != len(manifest.layout):
        raise CorruptObject(f"the run's manifest has {len(manifest.layout)} fragments and {len(manifest.initial)} initial values")
