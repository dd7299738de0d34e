import platform

from tutti.run.allocator import keep_freed_memory


def test_glibc_understands():
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
