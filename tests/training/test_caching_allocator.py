"""mixprec.memory.use_caching_allocator: in processes of their own, since it cannot be undone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mixprec import memory
from mixprec.ops._dispatch import library

BEGIN = "import torch\nfrom mixprec import memory\nmemory.use_caching_allocator()\n"

# Tensors hold what was written to them, whatever is allocated, freed, resized or shared meanwhile.
RANDOM = """
import random, threading
def work(seed):
    rng, kept = random.Random(seed), []
    for step in range(3000):
        t = torch.full((rng.randrange(1, 1 << rng.randrange(8, 21)),), float(step))
        if step % 7 == 0:
            t.untyped_storage().resize_(2 * t.nbytes)
        if step % 501 == 0:
            t.share_memory_()
        if step % 11 == 0:
            t = t.clone()
        kept.append((t, step))
        while kept and rng.random() < len(kept) / 40:
            t, value = kept.pop(rng.randrange(len(kept)))
            assert t.min() == value == t.max(), (t, value)
        if step % 400 == 0:
            memory.empty_cache()
        if step == 1500:
            memory.use_caching_allocator(max_cached=8 << 20)
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
failed = []
threading.excepthook = failed.append
for t in threads: t.start()
for t in threads: t.join()
assert not failed, failed
assert memory.memory_reserved() - memory.memory_allocated() <= 8 << 20
"""

# Pages of holes become a larger block; the cache holds no more than was in use at one moment.
HOLES = """
blocks = [torch.ones(1 << 18) for _ in range(64)]
before = memory.memory_allocated(), memory.memory_reserved()
del blocks[::2]
large = torch.ones(1 << 22)
assert (memory.memory_allocated(), memory.memory_reserved()) == (before[0] - (16 << 20), before[1])
assert all(b.sum() == 1 << 18 for b in blocks) and large.sum() == 1 << 22
del blocks, large
assert memory.memory_allocated() < before[0] - (60 << 20) and memory.memory_reserved() == before[1]
memory.empty_cache()
assert memory.memory_reserved() == memory.memory_allocated()
"""

# A child process has the parent's tensors and a cache of its own.
FORK = """
import os
torch.set_num_threads(1)  # OpenMP's threads do not exist in the child, which would wait for them
kept, _ = torch.ones(1 << 20), torch.ones(1 << 20)
del _
if (child := os.fork()) == 0:
    memory.empty_cache()
    t = torch.full((1 << 20,), 2.0)
    os._exit(0 if kept.sum() == 1 << 20 and t.sum() == 2 << 20 else 1)
assert os.waitpid(child, 0)[1] == 0 and kept.sum() == 1 << 20
"""

TOO_LARGE = """
memory.use_caching_allocator(max_cached=1 << 70)
try:
    torch.empty(1 << 50)
except RuntimeError as error:
    assert "can't allocate memory" in str(error), error
else:
    raise AssertionError
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is for Linux")
@pytest.mark.parametrize("program", [RANDOM, HOLES, FORK, TOO_LARGE])
def test_programs(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.memory_reserved() == memory.memory_allocated() == 0
    for wrong in (-1, 1.5, True, "1"):
        with pytest.raises(ValueError, match="max_cached must be a number of bytes >= 0, got"):
            memory.use_caching_allocator(wrong)
    monkeypatch.setattr(torch, "__version__", "1.0")
    with pytest.raises(RuntimeError, match=r"built with torch .* and this is 1\.0; to rebuild it"):
        memory.use_caching_allocator()
    monkeypatch.setattr(library, "C", None)
    monkeypatch.setattr(library, "LOAD_ERROR", "mixprec._C is not built")
    with pytest.raises(RuntimeError, match="not built"):
        memory.use_caching_allocator()
