"""A network of a run's own: a namespace in which loopback is the one link that all share, as slow as it is asked to be.

Needs root and iproute2. Elsewhere a race runs on the machine's own loopback, at full speed only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_MARK = "BENCHMARK_IN_NAMESPACE"
LINKS = {"unlimited": "", "100mbit": "100mbit", "10mbit": "10mbit"}
"""Names of links with their rates as tc writes them."""


def can_isolate() -> str:
    """Why a namespace cannot be made; empty when it can."""
    for program in ("unshare", "ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    done = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def isolated() -> bool:
    """Whether this process is in a namespace of :func:`command`."""
    return _MARK in os.environ


def command(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command and environment that run this package with ``arguments`` in a namespace of its own."""
    return ["unshare", "-n", sys.executable, "-m", "benchmarks", *arguments], {**os.environ, _MARK: "1"}


def bring_up() -> None:
    _run("ip link set lo up")


def limit(rate: str, port: int | None = None) -> None:
    """Give all traffic one link of ``rate``, both directions together; or only that to and from ``port``.

    The queue is deep and drops nothing. A store that talks to parts of itself by loopback does so freely.
    """
    _run("ip link set lo mtu 1500")
    if port is None:
        _run(f"tc qdisc add dev lo root tbf rate {rate} burst 192kb limit 64mb")
        return
    _run("tc qdisc add dev lo root handle 1: htb default 1 r2q 10000")
    _run("tc class add dev lo parent 1: classid 1:1 htb rate 100gbit quantum 60000")
    _run(f"tc class add dev lo parent 1: classid 1:2 htb rate {rate} burst 192kb cburst 192kb quantum 60000")
    _run("tc qdisc add dev lo parent 1:2 bfifo limit 64mb")
    for end in ("dport", "sport"):
        _run(f"tc filter add dev lo parent 1: protocol ip u32 match ip {end} {port} 0xffff flowid 1:2")


def bytes_sent(port: int | None = None) -> int:
    """Bytes that the link has carried so far; None for a port means all of loopback."""
    if port is not None:
        shown = subprocess.run(["tc", "-s", "class", "show", "dev", "lo"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"class htb 1:2 .*?Sent (\d+) bytes", shown, re.DOTALL)
        return int(found[1]) if found else 0
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    return 0


def _run(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True)
