"""DiLoCo of torchft over gloo, each node a replica group of one process; ``address`` is its lighthouse's."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from benchmarks import work
from benchmarks.nodes import common

TIMEOUT = timedelta(seconds=30)


def main() -> None:
    given = common.options()
    record = common.Recorder(given.events)
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{given.address}"
    model = work.make_model(given.seed)
    inner = work.make_optimizer(model)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def load(state: Mapping[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])
        outer.load_state_dict(state["outer"])
        record("healed", outer=manager.current_step())

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun would start one
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict(), "outer": outer.state_dict()},
        load_state_dict=load,
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=f"node-{given.node}_",
        timeout=TIMEOUT,
        quorum_timeout=timedelta(seconds=120),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="localhost",
    )
    record("ready")

    def after_step() -> Mapping[str, Any]:
        return {"version": manager.current_step()}

    with DiLoCo(manager, [model], inner, outer, sync_every=given.sync_every, backup_device=torch.device("cpu")):
        common.train(given, record, model, inner, after_step=after_step)
    record("end")
    if given.node == 0:
        common.validate(record, model)
    manager.shutdown(wait=False)
    os._exit(0)  # its threads would keep the process


if __name__ == "__main__":
    main()
