"""The overhead of a campaign as text and as a picture."""

from __future__ import annotations

from pathlib import Path

from gradientmail_torch.patterns.steering import Result, overhead_summary, overhead_table, plot_overhead
from gradientmail_torch.patterns.steering.report import percentile
from gradientmail_torch.patterns.steering.result import MARKS, TimeSpans, Timestamps


def campaign() -> list[Result]:
    results = []
    for number in range(1, 21):
        times = (0.0, 0.010, 0.011, 0.020, 0.020 + number / 1000, 0.030 + number / 1000, 0.031 + number / 1000, 0.040 + number / 1000)
        marks = Timestamps(**{name: 1e9 + at for name, at in zip(MARKS, times, strict=True)})
        spans = TimeSpans(
            running=number / 1000, serialize_inputs=0.0, deserialize_inputs=0.0, serialize_results=0.0, deserialize_results=0.0
        )
        results.append(Result(((), {}), method="f", task_id=f"{number:08d}-x", success=number != 3, timestamp=marks, time=spans))
    return results


def test_the_table_has_a_line_for_each_task_and_says_what_skew_touches() -> None:
    header, first, *_, note = overhead_table(campaign()).splitlines()
    assert header.split()[:4] == ["task", "method", "ok", "total"]
    assert first.split() == ["00000001", "f", "yes", "41.0", "19.0", "2.0", "19.0", "0.0", "1.0", "0.0", "2%", "10.0", "9.0"]
    assert "skew" in note
    assert overhead_table(campaign()).splitlines()[3].split()[2] == "no"


def test_a_task_without_marks_has_dashes_and_is_not_in_the_summary() -> None:
    assert overhead_table([Result(((), {}))]).splitlines()[1].split()[3] == "-"
    assert "0 tasks" in overhead_summary([Result(((), {}))])


def test_the_summary_has_median_and_95th_percentile_of_every_part() -> None:
    lines = {line.split()[0]: line.split()[1:] for line in overhead_summary(campaign()).splitlines()}
    assert lines["running"] == ["10.5", "19.0", "21%"]
    assert lines["queues"] == ["19.0", "19.0", "38%"]
    assert lines["total"] == ["50.5", "59.0", "100%"]
    assert lines["efficiency"] == ["21%", "2%"]
    assert lines["20"][0] == "tasks;"


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([3.0, 1.0, 2.0], percent) for percent in (5, 50, 95)] == [1.0, 2.0, 3.0]
    assert percentile([], 50) is None


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    plot_overhead(campaign(), tmp_path / "overhead.png")
    assert (tmp_path / "overhead.png").read_bytes().startswith(b"\x89PNG")
