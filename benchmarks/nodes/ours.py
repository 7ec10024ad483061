"""A plain loop with a :class:`Session`; ``address`` is the mailbox's URL."""

import time
from collections.abc import Mapping
from typing import Any

from benchmarks import work
from benchmarks.nodes import common
from gradientmail_torch import Session, align, open_mailbox
from gradientmail_torch.algorithms import DecoupledDiLoCo, OuterSGD
from gradientmail_torch.patterns.barrier import Barrier


def main() -> None:
    given = common.options()
    record = common.Recorder(given.events)
    settings = dict(given.settings)
    outer = OuterSGD(**settings.pop("outer", {}))
    session_settings = settings.pop("session", {})
    name = f"node-{given.node}"
    model = work.make_model(given.seed)
    optimizer = work.make_optimizer(model)
    mailbox = open_mailbox(given.address)
    session = Session(
        model,
        mailbox=mailbox,
        learner_id=name,
        algorithm=DecoupledDiLoCo(sync_every=given.sync_every, outer=outer, **settings),
        **session_settings,
    )
    record("joined", versions=session.versions, bytes_down=session.stats().usage.bytes_down)
    if not given.latecomer:
        Barrier(mailbox, name, poll_interval=0.2).wait("start", parties=given.present, timeout=120)
    with session:
        record("ready")

        def after_step() -> Mapping[str, Any]:
            began = time.monotonic()
            session.step(samples=given.rows)
            taken = time.monotonic() - began
            stats = session.stats()
            usage = stats.usage
            return {
                "stall_s": round(taken, 6),
                "version": min(stats.versions),
                "merged": stats.tally.merged,
                "discarded": stats.tally.discarded_work.steps,
                "up": usage.bytes_up,
                "down": usage.bytes_down,
                "requests": usage.requests,
            }

        common.train(given, record, model, optimizer, after_step=after_step)
        record("end")
    stats = session.stats()
    record(
        "closed",
        merged=stats.tally.merged,
        discarded=stats.tally.discarded_work.steps,
        up=stats.usage.bytes_up,
        down=stats.usage.bytes_down,
    )
    Barrier(mailbox, name, poll_interval=0.2).wait("closed", parties=1 if given.until != float("inf") else given.nodes, timeout=120)
    if given.node == 0:
        record("aligned", versions=align(model, mailbox=mailbox))
        common.validate(record, model)


if __name__ == "__main__":
    main()
