"""gradientmail cost and plan: dollars from what was used, and from what will be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradientmail_torch import keys
from gradientmail_torch.cli import plan as plans
from gradientmail_torch.cli.formats import bits_per_second, count, dollars, duration, number, size
from gradientmail_torch.cli.prices import Use, load, recognize
from gradientmail_torch.errors import ConfigError
from gradientmail_torch.mailbox import CountingMailbox, open_mailbox
from gradientmail_torch.messages import Beat, read
from tests.cli.conftest import Command, join, together, train

PRICES = load()


class TestPrices:
    def test_the_table_has_a_date_and_a_source_for_each_store(self) -> None:
        assert PRICES.date >= "2026-11"
        assert {"aws", "r2", "own"} <= PRICES.stores.keys()
        assert all(price.source for price in PRICES.stores.values())

    def test_a_million_polls_cost_what_the_price_list_says(self) -> None:
        assert Use(writes=1e6).dollars(PRICES.get("aws")) == pytest.approx(5.0)
        assert Use(reads=1e6).dollars(PRICES.get("aws")) == pytest.approx(0.4)
        assert Use(bytes_down=1e9, bytes_up=1e12).dollars(PRICES.get("aws")) == pytest.approx(0.09)
        assert Use(writes=1e6, reads=1e6, bytes_down=1e15).dollars(PRICES.get("r2")) == pytest.approx(4.86)

    def test_a_table_of_ones_own_is_read_strictly(self, tmp_path: Path) -> None:
        own = tmp_path / "prices.json"
        own.write_text('{"date": "2027-01-01", "note": "", "stores": {}, "store": {}}')
        with pytest.raises(ConfigError, match="cannot be read"):
            load(str(own))
        with pytest.raises(ConfigError, match="cannot be read"):
            load(str(tmp_path / "none"))

    @pytest.mark.parametrize(
        ("mailbox", "store"),
        [
            ("s3://bucket/run/", "aws"),
            ("s3://bucket/run/ at https://abc.r2.cloudflarestorage.com", "r2"),
            ("s3://bucket/run/ at https://s3.eu-west-1.amazonaws.com", "aws"),
            ("s3://bucket/run/ at https://t3.storage.dev", "tigris"),
            ("s3://bucket/run/ at http://minio:9000", "own"),
            ("file:///data/run", "own"),
        ],
    )
    def test_the_store_is_told_from_the_mailbox(self, mailbox: str, store: str) -> None:
        assert recognize(mailbox) == store


class TestCost:
    def test_what_the_learners_counted_is_summed_and_priced(self, command: Command, finished_run: str) -> None:
        shown = json.loads(command("cost", finished_run, "--json").stdout)
        uses = [learner["use"] for learner in shown["learners"]]
        assert len(uses) == 2
        total = Use(**{name: sum(use[name] for use in uses) for name in uses[0]})
        stores = {store["store"]: store for store in shown["stores"]}
        assert stores["aws"]["so_far"] == pytest.approx(total.dollars(PRICES.get("aws")))
        hours = sum(learner["seconds"] for learner in shown["learners"]) / 3600
        assert stores["r2"]["per_node_hour"] == pytest.approx(stores["r2"]["so_far"] / hours)
        assert [store["store"] for store in shown["stores"] if store["here"]] == ["own"]
        assert shown["lives_not_counted"] == 0

    def test_a_learner_says_in_its_beat_what_went_through_its_mailbox(self, tmp_path: Path, command: Command) -> None:
        box = CountingMailbox(open_mailbox(tmp_path / "mailbox"))
        session, model = join(box, "node-a", together(parties=1))  # type: ignore[arg-type]
        with session:
            train(session, model, 4)
        used = json.loads(command("cost", str(tmp_path / "mailbox"), "--json").stdout)["learners"][0]["use"]
        # The last beat cannot count itself.
        assert 0 < box.usage.bytes_up - used["bytes_up"] < 1000
        assert used["bytes_down"] == box.usage.bytes_down
        assert used["reads"] == box.usage.requests["get"]
        assert used["writes"] == box.usage.requests["put"] + box.usage.requests["list"] - 1

    def test_a_restarted_learner_takes_the_figures_of_its_lives_with_it(self, command: Command, tmp_path: Path) -> None:
        """Three lives, of which the second ends before its first beat."""
        url = str(tmp_path / "mailbox")

        def live() -> dict[str, float]:
            session, model = join(url, "node-a", together(parties=1))
            with session:
                train(session, model, 4)
            (learner,) = json.loads(command("cost", url, "--json").stdout)["learners"]
            return learner

        first = live()
        box = open_mailbox(url)
        box.put(keys.learner("node-a", 2), box.get(keys.learner("node-a", 1)) or b"")
        last = live()
        assert (first["lives"], last["lives"]) == (1, 2)
        assert last["seconds"] > first["seconds"]
        assert all(last["use"][name] > first["use"][name] for name in ("writes", "reads", "bytes_up", "bytes_down"))
        beat = read(box, Beat, keys.beat("node-a", 3))
        assert beat is not None
        assert last["use"]["bytes_up"] == first["use"]["bytes_up"] + beat.bytes_up
        assert list(box.list(keys.BEATS)) == [keys.beat("node-a", 3)]
        text = command("cost", url).stdout
        assert "node-a (2 lives)" in text
        assert "1 earlier life of restarted learners not counted" in text


def situation(**changes: float) -> plans.Situation:
    given = {"parameters": 1e8, "nodes": 4, "uplink_bits_per_s": 1e8, "downlink_bits_per_s": 1e8, "seconds_per_step": 0.5}
    return plans.Situation(**{**given, **changes})  # type: ignore[arg-type]


def settings(**changes: object) -> plans.Settings:
    return plans.Settings(**{"wire": "bf16", "fragments": 6, "sync_every": 50, **changes})  # type: ignore[arg-type]


class TestPlan:
    def test_traffic_of_a_node_hardly_depends_on_the_number_of_nodes(self) -> None:
        few, many = (plans.plan(situation(nodes=nodes), settings(), PRICES) for nodes in (4, 64))
        assert many.up_per_cycle_bytes < few.up_per_cycle_bytes
        assert many.down_per_cycle_bytes == pytest.approx(few.down_per_cycle_bytes, rel=0.2)

    def test_a_node_sends_its_contribution_and_its_share_of_the_commits(self) -> None:
        shown = plans.plan(situation(nodes=2, uplink_bits_per_s=1e9), settings(), PRICES)
        assert shown.up_per_cycle_bytes == pytest.approx(1e8 * (2 + (2 + 4) / 2), rel=1e-6)
        assert shown.down_per_cycle_bytes == pytest.approx(1e8 * (2 + 2 / 2))

    def test_the_recommended_cycle_leaves_the_link_half_of_its_time(self) -> None:
        for uplink in (1e7, 1e8, 1e9, 1e10):
            chosen = plans.recommend(situation(uplink_bits_per_s=uplink, downlink_bits_per_s=uplink), PRICES)
            assert chosen.link_load <= plans.LINK_LOAD
            assert chosen.fits

    def test_a_slow_link_gets_a_format_of_fewer_bits(self) -> None:
        assert plans.recommend(situation(uplink_bits_per_s=1e10, downlink_bits_per_s=1e10), PRICES).settings.wire == "bf16"
        assert plans.recommend(situation(uplink_bits_per_s=2e7, downlink_bits_per_s=2e7), PRICES).settings.wire == "int4"

    def test_what_does_not_fit_is_said(self, command: Command) -> None:
        asked = ["plan", "--params", "1.3B", "--nodes", "8", "--uplink", "10Mbit", "--sync-every", "20"]
        assert "does not fit" in command(*asked).stdout
        assert not json.loads(command(*asked, "--json").stdout)["link_load"] < 1

    def test_an_hour_of_default_polling_costs_about_two_cents_at_aws(self) -> None:
        shown = plans.plan(situation(parameters=1e6), settings(fragments=1, sync_every=500), PRICES)
        assert 0.005 < shown.dollars_per_node_hour["aws-region"] < 0.03

    def test_host_memory_grows_with_the_model_and_is_shown(self, command: Command) -> None:
        small, large = (plans.plan(situation(parameters=p), settings(), PRICES) for p in (1e9, 7e9))
        assert large.host_bytes == pytest.approx(7 * small.host_bytes)
        assert "up to 13.6 GB beside the model" in command("plan", "--params", "1B", "--nodes", "2", "--uplink", "1Gbit").stdout

    def test_figures_that_cannot_be_are_named(self, command: Command) -> None:
        asked = ["plan", "--params", "1e6", "--nodes", "2", "--uplink"]
        assert "is no bandwidth" in command(*asked, "fast", fails=True).stderr
        assert "seconds_per_step" in command(*asked, "1Gbit", "--step-seconds", "0", fails=True).stderr
        assert "wire must be" in command(*asked, "1Gbit", "--wire", "fp8", fails=True).stderr
        assert "parameters" in command("plan", "--params", "many", "--nodes", "2", "--uplink", "1Gbit", fails=True).stderr

    @pytest.mark.parametrize(
        ("text", "bits"),
        [("100Mbit", 1e8), ("1Gbit/s", 1e9), ("12.5MB/s", 1e8), ("100 Mbps", 1e8), ("1e6bit", 1e6), ("10mb", 1e7), ("10MB", 8e7)],
    )
    def test_bandwidths_are_read_as_people_write_them(self, text: str, bits: float) -> None:
        assert bits_per_second(text) == pytest.approx(bits)


def test_figures_are_written_as_people_read_them() -> None:
    assert [count(391_264), count(1.3e9), count(12)] == ["391 k", "1.3 G", "12"]
    assert [size(0), size(1_234), size(5.2e9)] == ["0 B", "1.2 kB", "5.2 GB"]
    assert [duration(1.23), duration(90), duration(7200)] == ["1.2 s", "1.5 min", "2.0 h"]
    assert [dollars(0), dollars(0.0314), dollars(12.345), dollars(1e-6)] == ["0", "0.031", "12.35", "< 0.0001"]
    assert [number("1.3e9"), number("1.3B"), number("350M")] == [1.3e9, 1.3e9, 3.5e8]
