"""Large memory that a thread has freed goes back to the system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """if True:
    import threading
    from gradientmail_torch.session.freed_memory import give_back_freed
    said = give_back_freed()

    def held():
        return 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))

    small = []

    def take_and_free():
        for size in (4 << 20, 8 << 20):  # freeing the first makes glibc keep what is as large
            large = []
            for _ in range(16):
                large.append(bytearray(size))
                small.append(bytes(1000))

    before = held()
    threads = [threading.Thread(target=take_and_free) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(said, held() - before < 32 << 20)
"""


def run(**environment: str) -> list[str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=plain | environment, capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
def test_what_threads_have_freed_is_given_back() -> None:
    assert run() == ["True", "True"]


@pytest.mark.parametrize(
    "environment", [{"MALLOC_MMAP_THRESHOLD_": "33554432"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432"}]
)
def test_what_the_user_has_set_stays(environment: dict[str, str]) -> None:
    assert run(**environment)[0] == "False"
