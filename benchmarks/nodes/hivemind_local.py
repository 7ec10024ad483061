"""Local updates of hivemind: parameters are averaged in the background once ``sync_every`` global steps are done."""

import os
import time
from pathlib import Path
from typing import Any

import hivemind

from benchmarks import work
from benchmarks.nodes import common


def main() -> None:
    given = common.options()
    record = common.Recorder(given.events)
    meeting = Path(given.address)  # a file in which the first node leaves its address
    peers = None
    if given.node > 0 or given.latecomer:
        while not meeting.exists():
            time.sleep(0.1)
        peers = [meeting.read_text()]
    dht = hivemind.DHT(initial_peers=peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    if peers is None:
        written = meeting.with_suffix(".new")
        written.write_text(str(dht.get_visible_maddrs()[0]))
        written.rename(meeting)
    model = work.make_model(given.seed)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="benchmark",
        params=[*model.parameters()],
        optimizer=lambda parameters: _adamw(parameters),
        batch_size_per_step=given.rows,
        target_batch_size=given.sync_every * work.GLOBAL_ROWS,
        use_local_updates=True,
        matchmaking_time=2.0,  # the default is longer than a cycle here
        averaging_timeout=30.0,
        averager_opts={"request_timeout": 1.0},
    )
    if given.latecomer:
        optimizer.load_state_from_peers()
        record("healed", outer=optimizer.local_epoch)
    record("ready")

    def after_step() -> dict[str, Any]:
        return {"version": optimizer.local_epoch}

    common.train(given, record, model, optimizer, after_step=after_step)
    record("end")
    if given.node == 0:
        common.validate(record, model)
    time.sleep(3)  # the other may still be averaging with this one
    os._exit(0)


def _adamw(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=work.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)


if __name__ == "__main__":
    main()
