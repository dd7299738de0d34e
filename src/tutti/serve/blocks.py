"""The blocks of a paged KV cache: who holds which, and which contain a known prefix.

A block holds the keys and values of `size` consecutive tokens of a sequence, in every layer (Kwon et al., "Efficient
memory management for large language model serving with PagedAttention", 2023). A block is held by as many sequences
as share its tokens. A full block has a digest of all tokens from the start of the sequence to its end, so a sequence
with the same beginning finds it, also after its holders have let go of it: free blocks keep their contents until they
are needed, the least recently used first.

This is bookkeeping only: numbers of blocks. The tensors are in the engine's store.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

Digest = bytes


def digests(tokens: Sequence[int], size: int, first: Digest = b"") -> list[Digest]:
    """The digests of the full blocks of a sequence. first: what distinguishes sequences with equal tokens, such as an
    adapter or the images of a prompt; or the digest of the block before."""
    found = []
    for i in range(len(tokens) // size):
        first = hashlib.blake2b(
            first + array("q", tokens[i * size : (i + 1) * size]).tobytes(), digest_size=16
        ).digest()
        found.append(first)
    return found


class Blocks:
    """A pool of blocks.

    count: number of blocks. size: tokens in a block. keep: whether full blocks are found by later sequences.
    """

    def __init__(self, count: int, size: int, keep: bool = True):
        if count < 1 or size < 1:
            raise ValueError(f"a cache of {count} blocks of {size} tokens; it needs at least one block of one token")
        self.count, self.size, self.keep = count, size, keep
        self.holders = [0] * count  # number of sequences that hold each block
        self.unheld: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))  # least recently used first
        self.digest: dict[int, Digest] = {}  # of full blocks with known contents
        self.block: dict[Digest, int] = {}

    @property
    def free(self) -> int:
        """Number of blocks that nobody holds."""
        return len(self.unheld)

    @property
    def used(self) -> int:
        """Number of blocks that somebody holds."""
        return self.count - self.free

    def needed(self, tokens: int) -> int:
        """Number of blocks of a sequence of so many tokens."""
        return -(-tokens // self.size)

    def take(self) -> int:
        """A block that nobody holds; its contents are forgotten. Raises IndexError if there is none."""
        if not self.unheld:
            raise IndexError("all blocks of the KV cache are held")
        block, _ = self.unheld.popitem(last=False)
        self._forget(block)
        self.holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more sequence holds a block."""
        if not self.holders[block]:
            del self.unheld[block]
        self.holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """A sequence lets go of its blocks. The last of them are reused first, since fewer sequences share them."""
        for block in reversed(list(blocks)):
            if not self.holders[block]:
                raise ValueError(f"block {block} is released more often than it was taken")
            self.holders[block] -= 1
            if not self.holders[block]:
                self.unheld[block] = None
                if block not in self.digest:
                    self.unheld.move_to_end(block, last=False)

    def find(self, wanted: Sequence[Digest]) -> list[int]:
        """The blocks with the longest known beginning of these digests. They are not held yet."""
        found = []
        for digest in wanted:
            if digest not in self.block:
                break
            found.append(self.block[digest])
        return found

    def know(self, block: int, digest: Digest) -> None:
        """A held block is full, with these contents. If another block has them already, that one is found."""
        if self.keep and digest not in self.block and block not in self.digest:
            self.digest[block], self.block[digest] = digest, block

    def is_own(self, block: int) -> bool:
        """Whether its only holder may write into it: no other sequence holds or may find it."""
        return self.holders[block] == 1 and block not in self.digest

    def forget_all(self) -> None:
        """Forget all contents, because the weights have changed. Held blocks stay held."""
        self.digest, self.block = {}, {}

    def _forget(self, block: int) -> None:
        digest = self.digest.pop(block, None)
        if digest is not None:
            del self.block[digest]
