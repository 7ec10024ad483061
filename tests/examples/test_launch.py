"""The launch examples: what can be checked of them here is run, and the rest is parsed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_executable_bash(script: Path) -> None:
    assert os.access(script, os.X_OK)
    ended = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr


def test_every_file_says_how_identity_credentials_and_restart_work() -> None:
    files = [path for path in LAUNCH.iterdir() if path.name != "README.md"]
    assert len(files) == 5
    table = (LAUNCH / "README.md").read_text()
    for path in files:
        head = path.read_text()[:1500]
        for word in ("Identity", "redentials", "Restart"):
            assert word in head, f"{path.name} says nothing of {word}"
        assert path.name in table


# --- ssh ------------------------------------------------------------------------------------------------


@pytest.fixture
def machines(tmp_path: Path) -> dict[str, str]:
    """An ssh that stays here, and a torchrun that writes down how it was called."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/bash\necho "$1" >> "$RECORD/hosts"\nshift\nexec env -i PATH="$PATH" HOME="$HOME" RECORD="$RECORD" "$@"\n')
    torchrun = tmp_path / "repo with blanks" / ".venv" / "bin" / "torchrun"
    torchrun.parent.mkdir(parents=True)
    torchrun.write_text(
        '#!/bin/bash\nprintf "%s\\n" "$@" "$AWS_SECRET_ACCESS_KEY" "$GRADIENTMAIL_RUN_KEY" > "$RECORD/$GRADIENTMAIL_LEARNER_ID"\n'
        'if [ "$GRADIENTMAIL_LEARNER_ID" = node-1 ] && [ ! -e "$RECORD/died" ]; then touch "$RECORD/died"; exit 9; fi\n'
    )
    sleep = tmp_path / "sleep"
    sleep.write_text("#!/bin/bash\n")
    for path in (ssh, torchrun, sleep):
        path.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SSH": str(ssh),
        "RECORD": str(tmp_path),
        "FOLDER": str(tmp_path / "repo with blanks"),
        "GRADIENTMAIL_MAILBOX": "s3://bucket/run?endpoint_url=http://store:1",
        "AWS_SECRET_ACCESS_KEY": "se'cret $(touch pwned)",
        "GRADIENTMAIL_RUN_KEY": "the same on all nodes",
    }


def test_ssh_starts_a_node_on_each_machine_and_starts_one_that_died_again(machines: dict[str, str], tmp_path: Path) -> None:
    command = [LAUNCH / "ssh.sh", "examples/train.py", "me@a", "me@b", "--", "--text", "a file"]
    ended = subprocess.run(command, env=machines, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted((tmp_path / "hosts").read_text().split()) == ["me@a", "me@b"]
    assert "node-1: node-1 ended with 9, starting it again" in ended.stdout
    for node in ("node-0", "node-1"):
        called = (tmp_path / node).read_text().splitlines()
        assert called[:3] == ["--standalone", "--nproc-per-node=1", "examples/train.py"]
        assert called[3:7] == ["--mailbox", machines["GRADIENTMAIL_MAILBOX"], "--learner-id", node]
        assert called[7:] == ["--text", "a file", "se'cret $(touch pwned)", "the same on all nodes"]
    assert not (tmp_path / "pwned").exists()


def test_ssh_says_what_is_missing(machines: dict[str, str]) -> None:
    del machines["GRADIENTMAIL_MAILBOX"]
    ended = subprocess.run([LAUNCH / "ssh.sh", "train.py", "host"], env=machines, capture_output=True, text=True, timeout=30)
    assert ended.returncode != 0
    assert "set it to the URL of the run" in ended.stderr


# --- spot machines --------------------------------------------------------------------------------------


@contextmanager
def metadata(answers: dict[str, str]) -> Iterator[str]:
    """A cloud's metadata service, of which ``answers`` holds the documents that are there."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path)
            body = (found or "").encode()
            self.send_response(200 if found is not None else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


NODE = "trap 'echo stopped in order; exit 0' TERM; echo started; while :; do read -rt 0.05 <> <(:); done"


@contextmanager
def watched(url: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "METADATA": url, "EVERY": "0.05"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([LAUNCH / "spot_notice.sh", *command], env=environment, text=True, start_new_session=True, **pipes) as node:
        try:
            yield node
        finally:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/latest/meta-data/spot/instance-action", '{"action": "terminate"}'),
        ("/computeMetadata/v1/instance/preempted", "TRUE"),
    ],
    ids=["aws", "google"],
)
def test_a_notice_stops_the_node_in_order(path: str, document: str) -> None:
    answers = {"/latest/api/token": "token"} if "latest" in path else {"/computeMetadata/v1/instance/preempted": "FALSE"}
    with metadata(answers) as url, watched(url, "bash", "-c", NODE) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == "started\n"
        answers[path] = document
        said, errors = node.communicate(timeout=30)
    assert said == "stopped in order\n"
    assert "will be taken away" in errors
    assert node.returncode == 143


def test_without_a_notice_it_is_as_if_it_were_not_there() -> None:
    with metadata({}) as url, watched(url, "bash", "-c", "echo done; exit 7") as node:
        assert node.communicate(timeout=30) == ("done\n", "")
        assert node.returncode == 7


def test_sigterm_goes_on_to_the_node() -> None:
    with metadata({}) as url, watched(url, "bash", "-c", NODE) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == "started\n"
        node.send_signal(signal.SIGTERM)
        said, _ = node.communicate(timeout=30)
    assert said == "stopped in order\n"
    assert node.returncode == 0


# --- declarations ---------------------------------------------------------------------------------------


def test_the_kubernetes_job_is_indexed_and_takes_its_identity_from_the_index() -> None:
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["backoffLimitPerIndex"] >= 1
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # what backoffLimitPerIndex demands
    assert pod["terminationGracePeriodSeconds"] >= 30
    (node,) = pod["containers"]
    environment = {each["name"]: each for each in node["env"]}
    assert [*environment].index("INDEX") < [*environment].index("GRADIENTMAIL_LEARNER_ID")  # a reference looks back
    assert environment["GRADIENTMAIL_LEARNER_ID"]["value"] == "node-$(INDEX)"
    assert "secretRef" in node["envFrom"][0]


def test_the_skypilot_task_holds_no_secret_and_runs_bash() -> None:
    task: dict[str, Any] = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert task["secrets"] == {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "GRADIENTMAIL_RUN_KEY": ""}
    assert "num_nodes" not in task  # nodes of one gang wait for each other
    assert task["resources"]["job_recovery"]
    for part in ("setup", "run"):
        assert subprocess.run(["bash", "-n"], input=task[part], text=True, timeout=30).returncode == 0


def test_the_unit_is_one_that_systemd_takes() -> None:
    unit = (LAUNCH / "gradientmail.service").read_text()
    sections = re.findall(r"^\[(\w+)\]$", unit, re.M)
    assert sections == ["Unit", "Service", "Install"]
    assert all("=" in line for line in unit.splitlines() if line and line[0] not in "#[")
    start = re.search(r"^ExecStart=(.*)$", unit, re.M)
    assert start is not None
    assert start[1].startswith("/")
    if analyze := shutil.which("systemd-analyze"):
        ended = subprocess.run([analyze, "verify", str(LAUNCH / "gradientmail.service")], capture_output=True, text=True, timeout=30)
        assert not [line for line in ended.stderr.splitlines() if "gradientmail.service" in line and "not executable" not in line]


def test_the_arguments_in_the_examples_are_those_of_the_training_script() -> None:
    known = set(re.findall(r'add_argument\("(--[a-z-]+)"', (LAUNCH.parent / "train.py").read_text()))
    for path in LAUNCH.iterdir():
        after = path.read_text().partition("examples/train.py")[2]
        used = set(re.findall(r"(?<![\w-])--(?:mailbox|learner-id|steps|sync-every|text)\b", after))
        assert used <= known, path.name
    assert json.dumps(sorted(known))
