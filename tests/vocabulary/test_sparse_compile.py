"""The compiled Triton kernels of the sparse products, and how often they are compiled: no GPU is needed."""

from __future__ import annotations

import random
import re
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from benchmarks.assembly import LOAD, STORE, accesses, bits, blocks, code, loops, taken
from benchmarks.launches import TARGETS, compiling, device_name
from grpo_kernels.vocabulary.backends import triton_sparse as backend
from support import sparse_cases as cases

KERNELS = (
    backend._slot_logits_kernel, backend._add_weight_rows_kernel, backend._add_hidden_rows_kernel, backend._add_pieces_kernel,
)  # fmt: skip

#: Dtypes of hidden states and weight.
PAIRS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
)

pytestmark = pytest.mark.skipif(
    not isinstance(KERNELS[0], JITFunction), reason="TRITON_INTERPRET=1: there is nothing to compile"
)


def launch(n: int, vocab: int, width: int, hidden: torch.dtype, weight: torch.dtype, gap: int = 0) -> None:
    slots = cases.random_slots(n, vocab)
    x, y = (torch.zeros(rows, width + gap, dtype=dtype)[:, :width] for rows, dtype in ((n, hidden), (vocab, weight)))
    backend.slot_logits(x, y, slots)
    backend.add_weight_rows(cases.values_for(slots), slots, y, x)
    with mock.patch.object(backend, "PIECE", 4):  # so that an id may be cut
        backend.add_hidden_rows(cases.values_for(slots), slots, x, y)


@pytest.mark.parametrize("gap", (0, 1))
@pytest.mark.parametrize("target", TARGETS)
def test_budgets(target: str, gap: int) -> None:
    """No spills, no fp64, at least four programs of 128 threads by registers and, where rows are aligned, wide accesses."""
    for hidden, weight in PAIRS[: 2 if gap else 4]:
        with compiling(target) as launches:
            launch(7, 40, 64, hidden, weight, gap)
        assert [name for name, _ in launches] == [kernel.__name__ for kernel in KERNELS]
        for name, kernel in launches:
            assembly, used = code(kernel), taken(kernel)
            said = (target, name, hidden, weight, used)
            assert used["spilled"] == used["stack"] == 0 and used["registers"] <= 128, said
            assert not re.search(r"\.f64|_f64", assembly), said
            if gap == 0 and hidden == weight:
                loads = max(width for loop in loops(assembly) for width in accesses(LOAD, loop))
                stores = max(bits(m[0]) for m in re.finditer(STORE, assembly))
                assert (loads, stores) == (128, 32 if kernel is launches[0][1] else 128), (*said, loads, stores)


@pytest.mark.parametrize("target", TARGETS)
def test_a_program_without_an_id_ends_after_one_load(target: str) -> None:
    with compiling(target) as launches:
        launch(7, 40, 64, torch.bfloat16, torch.float32)
    body, successors = blocks(code(launches[2][1]))
    # The fewest accesses on a way from the entry to each block, and from there to the end.
    fewest, stack = {0: accesses(f"{LOAD}|{STORE}", body[0])}, [0]
    while stack:
        at = stack.pop()
        for block in successors[at]:
            found = fewest[at] + accesses(f"{LOAD}|{STORE}", body[block])
            if block not in fewest or len(found) < len(fewest[block]):
                fewest[block] = found
                stack.append(block)
    ends = [fewest[i] for i, block in enumerate(body) if i in fewest and any(re.match(r"ret;|s_endpgm", x) for x in block)]
    assert min(ends, key=len) == ([] if target == "gfx942" else [64]), ends  # AMD: by a scalar load


@pytest.mark.parametrize("vocab", (3, 200))
def test_there_are_programs_for_as_many_ids_as_there_can_be(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of padded slots no more than the vocabulary has ids; the places are those where the used ones begin."""
    width, grids = 64, []
    monkeypatch.setattr(backend, "run", lambda kernel, launch, grid, *_: grids.append(grid(launch(0))))
    g = torch.Generator().manual_seed(0)
    for m in (1, 40, 400, 8000):
        ids = torch.randint(-vocab, vocab, (m,), generator=g).clamp(min=-1).to(torch.int32).sort().values
        found = backend.first_places(ids, min(m, vocab)).tolist()
        listed = ids.tolist()
        want = [listed.index(i) for i in sorted(set(listed)) if i >= 0]
        assert found == want + [m] * (min(m, vocab) - len(want))
        slots = backend.Slots(ids.to(torch.int64), torch.tensor([0, m]), torch.zeros(m, dtype=torch.int64))
        with compiling("sm_90"):
            backend.add_hidden_rows(torch.ones(m), slots, torch.zeros(1, width), torch.zeros(vocab, width))
        # A block of columns has them all; of many slots, an id may have programs for every PIECE of its own.
        cut = [m // backend.PIECE] * 2 if m >= 2 * backend.PIECE else [0]
        assert grids == [min(m, vocab) + cut[0], *cut[1:]], m
        grids.clear()


@pytest.mark.parametrize("gap", (0, 3))
def test_no_size_compiles_again(gap: int) -> None:
    device, draw, counts = device_name("sm_90"), random.Random(0), []
    with compiling("sm_90"):
        for n, vocab, width in ((40, 48, 64), (1, 16, 16), (16, 17, 1024), *((draw.randint(2, 99), 50, 48) for _ in range(5))):
            launch(n, vocab, width, torch.bfloat16, torch.bfloat16, gap)
            counts.append([len(kernel.device_caches[device][0]) for kernel in KERNELS])
    assert all(count == counts[0] for count in counts[1:]), counts
