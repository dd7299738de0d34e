import platform
import subprocess
import sys

import pytest

from tutti.analysis.allocator import keep_freed_memory

glibc = platform.libc_ver()[0] == "glibc"


def test_glibc_understands():
    assert keep_freed_memory() == glibc


# What a step frees stays resident; what lies between things that stay is given back when asked for.
RESIDENT = """
from tutti.analysis.allocator import give_back_freed_memory, keep_freed_memory

def resident():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

keep_freed_memory()
before = resident()
made = [b"x" * 100_000 for _ in range(1_000)]
kept = made[::50]
del made
assert resident() - before > 80e6
give_back_freed_memory()
assert resident() - before < 20e6
"""


@pytest.mark.skipif(not glibc, reason="the allocator of glibc")
@pytest.mark.starts
def test_between_what_stays():
    subprocess.run([sys.executable, "-c", RESIDENT], check=True)
