"""The pages are run on a real run."""

from tests.cli.conftest import finished_run  # noqa: F401 — a fixture
