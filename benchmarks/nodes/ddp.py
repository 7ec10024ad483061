"""Torch's DistributedDataParallel over gloo; with ``post_local`` its post-local SGD: averaging in cycles after a warm-up."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks import work
from benchmarks.nodes import common


def main() -> None:
    given = common.options()
    record = common.Recorder(given.events)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{given.address}", rank=given.node, world_size=given.nodes, timeout=timedelta(minutes=30)
    )
    model = work.make_model(given.seed)
    parallel = DistributedDataParallel(model)
    optimizer = inner = work.make_optimizer(model)
    if given.settings.get("post_local"):
        warm_up = int(given.settings["warm_up_steps"])
        groups = [dist.new_group([rank]) for rank in range(given.nodes)]  # its default counts GPUs, and fails on a CPU
        state = PostLocalSGDState(None, groups[given.node], warm_up, post_local_gradient_allreduce=False)
        parallel.register_comm_hook(state, post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(given.sync_every, warm_up))
    record("ready")
    common.train(given, record, parallel, optimizer, scheduled=inner)
    record("end")
    if given.node == 0:
        common.validate(record, model)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
