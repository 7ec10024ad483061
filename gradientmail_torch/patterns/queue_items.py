"""The items of a Shared Queue as they lie in the mailbox: blocks of JSON, and one manifest that names them."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated

import msgspec

from gradientmail_torch import messages
from gradientmail_torch.errors import ConfigError, CorruptObject
from gradientmail_torch.keys import QueueKeys
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import Count, Nonce, Record
from gradientmail_torch.patterns.json_values import from_json, to_json

BLOCK_ITEMS = 64
MAX_ITEM_BYTES = 128 << 10
_KEPT_BLOCKS = 16

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Manifest(Record, frozen=True):
    """What is in a queue. Created once, after the blocks."""

    nonce: Nonce
    digest: Sha256
    """Of the items as they were given, and of the seed: who fills the queue again must give the same."""
    count: Count
    blocks: tuple[Sha256, ...]
    """Digest of each block, in order."""


def publish(mailbox: Mailbox, keys: QueueKeys, items: Sequence[object], *, seed: int | None, nonce: str, name: str) -> Manifest:
    """Fill the queue, unless it holds these items already; raises :class:`ConfigError` when it holds others."""
    texts = [_item(item, f"item {place} of queue {name!r}") for place, item in enumerate(items)]
    digest = hashlib.sha256(b"\n".join([str(seed).encode(), *texts])).hexdigest()
    manifest = messages.read(mailbox, Manifest, keys.manifest())
    if manifest is None:
        if seed is not None:
            random.Random(seed).shuffle(texts)
        blocks = [b"[" + b",".join(texts[start : start + BLOCK_ITEMS]) + b"]" for start in range(0, len(texts), BLOCK_ITEMS)]
        for place, block in enumerate(blocks):
            mailbox.put(keys.items(digest, place), block)  # others may write the same bytes at the same time
        mine = Manifest(nonce=nonce, digest=digest, count=len(texts), blocks=tuple(hashlib.sha256(block).hexdigest() for block in blocks))
        if mailbox.put_if_absent(keys.manifest(), messages.encode(mine)):
            return mine
        manifest = messages.read(mailbox, Manifest, keys.manifest())
        if manifest is not None and manifest.digest != digest:
            for place in range(len(blocks)):  # nobody will ever read them
                mailbox.delete(keys.items(digest, place))
    if manifest is None or manifest.digest != digest:
        raise ConfigError(
            f"queue {name!r} in {mailbox!r} was filled with other items{f' ({manifest.count})' if manifest else ''} or another seed. "
            "A name serves once: put the epoch into it, or give the same items in the same order on every node"
        )
    return manifest


class Items:
    """Reads the items of a filled queue, a block at a time."""

    def __init__(self, mailbox: Mailbox, keys: QueueKeys, manifest: Manifest) -> None:
        self._mailbox = mailbox
        self._keys = keys
        self._manifest = manifest
        self._blocks: OrderedDict[int, list[object]] = OrderedDict()

    def __len__(self) -> int:
        return self._manifest.count

    def __getitem__(self, place: int) -> object:
        number, within = divmod(place, BLOCK_ITEMS)
        block = self._blocks.pop(number, None) or self._load(number)
        self._blocks[number] = block
        while len(self._blocks) > _KEPT_BLOCKS:
            self._blocks.popitem(last=False)
        return block[within]

    def _load(self, number: int) -> list[object]:
        key = self._keys.items(self._manifest.digest, number)
        data = self._mailbox.get(key, length=BLOCK_ITEMS * (MAX_ITEM_BYTES + 1) + 2)
        if data is None or hashlib.sha256(data).hexdigest() != self._manifest.blocks[number]:
            raise CorruptObject(f"{key!r} in {self._mailbox!r} is {'gone' if data is None else 'not what the queue was filled with'}")
        block = from_json(data, what=repr(key))
        if not isinstance(block, list) or len(block) != min(BLOCK_ITEMS, self._manifest.count - number * BLOCK_ITEMS):
            raise CorruptObject(f"{key!r} in {self._mailbox!r} is not a block of {BLOCK_ITEMS} items")
        return block


def _item(item: object, what: str) -> bytes:
    text = to_json(item, what=what)
    if len(text) > MAX_ITEM_BYTES:
        raise ConfigError(f"{what} takes {len(text)} bytes, at most {MAX_ITEM_BYTES} fit: put the data elsewhere and queue its name")
    return text
