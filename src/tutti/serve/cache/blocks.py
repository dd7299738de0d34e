"""The pool of blocks of a paged KV cache: reference counts, and which blocks contain a cached prefix.

A block holds the keys and values of `size` consecutive tokens of a sequence, in every layer (Kwon et al., "Efficient
memory management for large language model serving with PagedAttention", 2023). The reference count of a block is the
number of sequences that share its tokens. A full block has a digest of all tokens from the start of the sequence to its
end, so a sequence with the same beginning finds it, also after the others have released it: free blocks keep their
contents until they are needed, the least recently used first.

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
    chain = []
    for i in range(len(tokens) // size):
        first = hashlib.blake2b(
            first + array("q", tokens[i * size : (i + 1) * size]).tobytes(), digest_size=16
        ).digest()
        chain.append(first)
    return chain


class BlockPool:
    """A pool of blocks.

    count: number of blocks. size: tokens in a block. keep: whether full blocks are found by later sequences.
    """

    def __init__(self, count: int, size: int, keep: bool = True):
        if count < 1 or size < 1:
            raise ValueError(f"a cache of {count} blocks of {size} tokens; it needs at least one block of one token")
        self.count, self.size, self.keep = count, size, keep
        self.ref_count = [0] * count  # sequences that use each block
        self.free_list: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))  # least recently used first
        self.digest: dict[int, Digest] = {}  # of full blocks with known contents
        self.block: dict[Digest, int] = {}

    @property
    def free(self) -> int:
        """Number of blocks that no sequence uses."""
        return len(self.free_list)

    @property
    def used(self) -> int:
        """Number of blocks that sequences use."""
        return self.count - self.free

    def needed(self, tokens: int) -> int:
        """Number of blocks of a sequence of so many tokens."""
        return -(-tokens // self.size)

    def allocate(self) -> int:
        """Take a free block and forget its contents. Raises IndexError if there is none."""
        if not self.free_list:
            raise IndexError("all blocks of the KV cache are held")
        block, _ = self.free_list.popitem(last=False)
        self._forget(block)
        self.ref_count[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Count one more sequence that uses a block."""
        if not self.ref_count[block]:
            del self.free_list[block]
        self.ref_count[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Count one sequence less for each of its blocks. The last are reused first: fewer sequences share them."""
        for block in reversed(list(blocks)):
            if not self.ref_count[block]:
                raise ValueError(f"block {block} is released more often than it was taken")
            self.ref_count[block] -= 1
            if not self.ref_count[block]:
                self.free_list[block] = None
                if block not in self.digest:
                    self.free_list.move_to_end(block, last=False)

    def find(self, wanted: Sequence[Digest]) -> list[int]:
        """The blocks of the longest cached prefix of these digests. Their reference counts do not change."""
        blocks = []
        for digest in wanted:
            if digest not in self.block:
                break
            blocks.append(self.block[digest])
        return blocks

    def register(self, block: int, digest: Digest) -> None:
        """Register the contents of a full block in use. If another block has them already, `find` returns that one."""
        if self.keep and digest not in self.block and block not in self.digest:
            self.digest[block], self.block[digest] = digest, block

    def is_own(self, block: int) -> bool:
        """Whether the only sequence that uses a block may write into it: no other uses it or may find it."""
        return self.ref_count[block] == 1 and block not in self.digest

    def forget_all(self) -> None:
        """Forget all contents, because the weights have changed. Blocks in use stay in use."""
        self.digest, self.block = {}, {}

    def _forget(self, block: int) -> None:
        digest = self.digest.pop(block, None)
        if digest is not None:
            del self.block[digest]
