"""The guards in conftest.py: a test that leaves something behind fails."""

from __future__ import annotations

from pathlib import Path

import pytest

LEAKS = {
    "threads": "import threading\ndef leak(): t = threading.Timer(9, print); t.daemon = True; t.start()",
    "processes": "import subprocess\ndef leak(): subprocess.Popen(['sleep', '20'])",
    "variables": "import os\ndef leak(): os.environ['LEFT'] = '1'",
}


@pytest.mark.parametrize("kind", LEAKS)
def test_a_test_that_leaves_something_behind_fails(kind: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    guards = Path(__file__).with_name("conftest.py").read_text().replace("_ENDING_S = 10.0", "_ENDING_S = 0.1")
    pytester.makeconftest(guards.replace('pytest_plugins = ["pytester"]', ""))
    pytester.makepyfile(f"{LEAKS[kind]}\ndef test_leaks():\n    leak()\ndef test_clean():\n    pass\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([f"*the test left *{kind}*"])
