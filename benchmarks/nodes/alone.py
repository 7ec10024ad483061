"""One process without communication. Several of them are the bound that communication is measured against."""

from benchmarks import work
from benchmarks.nodes import common


def main() -> None:
    given = common.options()
    record = common.Recorder(given.events)
    model = work.make_model(given.seed)
    optimizer = work.make_optimizer(model)
    record("ready")
    common.train(given, record, model, optimizer)
    record("end")
    if given.node == 0:
        common.validate(record, model)


if __name__ == "__main__":
    main()
