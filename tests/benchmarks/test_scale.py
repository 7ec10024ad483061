"""The simulated network of the benchmark of scale, and a run of it in small."""

from __future__ import annotations

import pytest
import torch

from benchmarks import scale
from benchmarks.scale import FRAGMENTS, PARAMETERS, MeteredMailbox, Point, measure
from gradientmail_torch.algorithms import wire
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import TensorSpec
from gradientmail_torch.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(monotonic=0.0)


@pytest.fixture
def box(clock: ManualClock) -> MeteredMailbox:
    return MeteredMailbox(MemoryMailbox(), clock, bits_per_s=8e6)


def test_data_takes_the_bytes_and_the_time_that_it_would_with_a_large_model(box: MeteredMailbox, clock: ManualClock) -> None:
    spec = TensorSpec(name="p00", shape=(scale.ELEMENTS,), dtype="float32")
    data = wire.encode([torch.ones(scale.ELEMENTS)], [spec], "bf16")
    box.put("data/0000/0000000001/a-0.delta", data)
    nominal = 2 * PARAMETERS / FRAGMENTS
    assert box.up["delta"] == pytest.approx(nominal, rel=0.01)
    assert clock.monotonic() == pytest.approx(nominal / 1e6, rel=0.01)
    assert box.get("data/0000/0000000001/a-0.delta") == data
    assert box.down["delta"] == box.up["delta"]


def test_records_take_their_own_bytes_and_do_not_wait_behind_data(box: MeteredMailbox, clock: ManualClock) -> None:
    box.put_if_absent("rounds/0000/0000000001/a", b"record")
    assert (box.up["rounds"], clock.monotonic()) == (6, 0.0)
    assert box.get("rounds/0000/0000000001/a") == b"record"
    assert box.get("rounds/0000/0000000001/b") is None
    assert box.requests == {"put rounds": 1, "get rounds": 2}


@pytest.mark.parametrize(("keys", "pages"), [(0, 1), (3, 1), (1000, 2), (1001, 2)])
def test_a_listing_is_billed_by_the_page(box: MeteredMailbox, keys: int, pages: int) -> None:
    for number in range(keys):
        box.inner.put(f"rounds/{number:04}", b"")
    assert len(list(box.list("rounds/"))) == keys
    assert box.requests["list rounds"] == pages


def test_a_run_in_small_has_all_its_figures() -> None:
    row = measure(Point(nodes=3, link="10gbit", cycles=1.0))
    assert row["contributions_per_round"] == pytest.approx(3.0, abs=0.5)
    assert 0 < row["commit_s"] < row["adopt_s"] < row["sync_every"]
    assert row["merge_gb_per_cycle"] > 0.5
    assert row["gb_up"] > 100
    assert set(row["dollars"]) >= {"aws", "r2"}
    assert row["dollars"]["aws"] > row["dollars_requests"]["aws"] > 0.0
