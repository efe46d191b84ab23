"""Saved tensors are offloaded and copied back in time, tested with copies that run only when they are awaited."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier.core.wrapped_forward import install, unwrap
from roomier.engine.compile import compile_blocks
from roomier.techniques.activation.block_forward import BlockForward, Keep, Recompute
from roomier.techniques.activation.copies import MIN_BYTES, Copies, Offload, StreamCopies
from tests.activation.kinds import KINDS
from tests.activation.steps import assert_equal, step_of, use_no_cache
from tests.covering import few

CPU = torch.device("cpu")
NUM_BLOCKS = 6
WIDTH = 32
ROWS = 64
KIB = 1024


class LateCopies(Copies):
    """Copies that run only when code waits for them. Until then, the target has other values.

    Attributes:
        num_bytes: number of bytes that were copied to the host and to the device.
        log: entries ``"out"`` and ``"back"`` for each copy, and entries of the test.
    """

    def __init__(self) -> None:
        super().__init__(CPU)
        self.num_bytes = {"out": 0, "back": 0}
        self.log: list[str] = []
        self.here: list[weakref.ref[Tensor]] = []
        self._queue: list[Callable[[], None]] = []

    def to_host(self, tensor: Tensor) -> Tensor:
        self.here.append(weakref.ref(tensor))
        return self._later("out", tensor)

    def to_device(self, tensor: Tensor) -> Tensor:
        made = self._later("back", tensor)
        self.here.append(weakref.ref(made))
        return made

    def _later(self, way: str, source: Tensor) -> Tensor:
        target = torch.full_like(source, 255)
        self.num_bytes[way] += source.numel()
        self.log.append(way)
        weak_source, weak_target = weakref.ref(source), weakref.ref(target)

        def copy() -> None:
            source, target = weak_source(), weak_target()
            if target is not None:
                assert source is not None, "freed before it was copied"
                target.copy_(source)

        self._queue.append(copy)
        return target

    def mark(self) -> int:
        return len(self._queue)

    def wait(self, mark: int) -> None:
        for index in range(mark):
            self._queue[index]()
            self._queue[index] = lambda: None

    def bytes_here(self) -> int:
        """Return the number of bytes of offloaded tensors that are currently on the device."""
        return sum(tensor.numel() for each in self.here if (tensor := each()) is not None)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(x * mask)), 0.2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
        self.mask = (self.x > -0.9).float()

    def loss(self) -> Tensor:
        x = self.first(self.x)
        for block in self.blocks:
            x = block(x, self.mask)
        return x.square().mean()


@contextmanager
def moved(blocks: list[nn.Module], keep: Keep, min_bytes: int = 1) -> Iterator[tuple[LateCopies, Offload]]:
    copies = LateCopies()
    offload = Offload(CPU, min_bytes, copies)
    for block in blocks:
        install(block, BlockForward(block, keep, offload))
    try:
        yield copies, offload
    finally:
        for block in blocks:
            unwrap(block)


@pytest.mark.parametrize("keep", Keep)
def test_every_read_waits_for_its_copy(keep: Keep) -> None:
    plain, ours = Net(), Net()
    with moved(list(ours.blocks), keep) as (copies, _):
        for _ in range(3):
            assert_equal(step_of(ours, ours.loss), step_of(plain, plain.loss))
    assert copies.num_bytes["out"] > copies.num_bytes["back"] > 0


@pytest.mark.parametrize("keep", Keep)
@pytest.mark.parametrize("kind", few(KINDS, 2))
def test_every_kind_of_model_with_late_copies(kind: str, keep: Keep) -> None:
    """Test position biases that all blocks share, skip connections, and caches of matrix products."""

    def step(keeps: Keep | None) -> Any:
        torch.manual_seed(0)
        network, loss = KINDS[kind]()
        network.train()
        if keeps is None:
            use_no_cache(network)
        blocks = [] if keeps is None else [each for each in network.modules() if _is_block(each)]
        with moved(blocks, keeps or Keep.ALL):
            return [step_of(network, loss) for _ in range(2)]

    for ours, theirs in zip(step(keep), step(None), strict=True):
        assert_equal(ours, theirs)


def _is_block(module: nn.Module) -> bool:
    names = {"Block", "BertLayer", "ViTLayer", "T5Block", "Down", "Up", "MixtralDecoderLayer"}
    return type(module).__name__ in names


def test_at_most_two_blocks_are_on_the_device() -> None:
    peaks = {}
    for num_blocks in (3, NUM_BLOCKS):
        net = Net()
        with moved(list(net.blocks[:num_blocks]), Keep.ALL) as (copies, _):
            held: list[int] = []
            for block in net.blocks:
                block.register_forward_hook(lambda *_, copies=copies, held=held: held.append(copies.bytes_here()))
                block.register_full_backward_hook(lambda *_, copies=copies, held=held: held.append(copies.bytes_here()))
            net.loss().backward()
            peaks[num_blocks] = max(held)
            assert copies.bytes_here() <= 2 * ROWS * WIDTH * 4  # x and the mask, which belong to the network
    one = ROWS * WIDTH * 4
    # for each block: x, the input and output of GELU, and the scale of dropout (the mask is shared)
    per_block = (1 + 2 + 2 + 2) * one
    assert peaks[NUM_BLOCKS] == peaks[3] <= 2 * (per_block + 3 * one)


def test_a_block_is_copied_back_while_the_next_block_computes() -> None:
    net = Net()
    with moved(list(net.blocks), Keep.INPUT) as (copies, _):
        for number, block in enumerate(net.blocks):
            block.register_full_backward_pre_hook(lambda *_, n=number: copies.log.append(f"begin {n}"))
            block.register_full_backward_hook(lambda *_, n=number: copies.log.append(f"end {n}"))
        net.loss().backward()
    backward = copies.log[copies.log.index(f"begin {NUM_BLOCKS - 1}") :]
    # The last two blocks are still on the device. Each other block is copied while the next block is recomputed.
    assert backward == [
        *("begin 5", "end 5", "begin 4", "back", "end 4", "begin 3", "back", "end 3"),
        *("begin 2", "back", "end 2", "begin 1", "back", "end 1", "begin 0", "end 0"),
    ]


def test_a_storage_is_moved_one_time() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            left, right = x.chunk(2, dim=1)
            return x * mask + torch.cat([left * right, right * left], dim=1) * mask

    blocks: list[nn.Module] = [Views(), Views()]
    x = torch.rand(8, 8, requires_grad=True)
    mask = torch.rand(8, 8)
    with moved(blocks, Keep.ALL) as (copies, _):
        last = blocks[1](blocks[0](x + 0, mask), mask)
    assert last.requires_grad
    # The inputs of the blocks and the mask are copied.
    assert copies.num_bytes["out"] == (x.numel() + mask.numel() + last.numel()) * 4


def test_parameters_and_small_tensors_stay_on_the_device() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(256, 256)
            self.frozen = nn.Linear(256, 256).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.linear(x))

    for autocast in (False, True):
        block = Wide()
        with moved([block], Keep.ALL, min_bytes=100 * KIB) as (copies, _), torch.autocast("cpu", enabled=autocast):
            block(torch.rand(2, 256, requires_grad=True)).sum().backward()
        # Autocast converts a frozen weight each time, so the result exists only for the backward.
        assert copies.num_bytes["out"] == (256 * 256 * 2 if autocast else 0)
    assert MIN_BYTES == 2**20


def test_modifying_a_saved_tensor_raises_as_without_offloading() -> None:
    class Writing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            z = y * y
            y.add_(1)
            return z

    for offloads in (False, True):
        block = Writing()
        with moved([block] if offloads else [], Keep.ALL):
            loss = block(torch.rand(4, 4, requires_grad=True)).sum()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_an_error_in_a_block_has_no_effect_on_later_steps() -> None:
    plain, ours = Net(), Net()

    def stumble(*_: Any) -> None:
        raise ArithmeticError

    with moved(list(ours.blocks), Keep.ALL) as (_, offload):
        handle = ours.blocks[3].up.register_forward_hook(stumble)
        with pytest.raises(ArithmeticError):
            ours.loss()
        handle.remove()
        ours.loss()  # a forward pass without a backward pass
        assert_equal(step_of(ours, ours.loss), step_of(plain, plain.loss))
        assert len(offload._present) <= 2


def test_keep_can_change_between_steps() -> None:
    plain, ours = Net(), Net()
    with moved(list(ours.blocks), Keep.ALL) as (copies, _):
        for step in range(6):
            for number, block in enumerate(ours.blocks):
                block.forward.keep = list(Keep)[(step + number) % 3]
                block.forward.offloads = (step + number) % 2 == 0
            assert_equal(step_of(ours, ours.loss), step_of(plain, plain.loss))
    assert copies.num_bytes["back"] > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.more
@pytest.mark.parametrize("keep", list(Keep))
def test_saved_tensors_of_compiled_blocks_are_offloaded(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # traces without generating code
    plain, ours = Net(), Net()
    for block in plain.blocks:
        install(block, BlockForward(block, keep))
    compile_blocks(list(plain.blocks), CPU)
    with moved(list(ours.blocks), keep) as (copies, _):
        forwards = [block.forward for block in ours.blocks]
        compile_blocks(list(ours.blocks), CPU)
        Recompute(forwards).move_compiled()
        assert_equal(step_of(ours, ours.loss), step_of(plain, plain.loss))
        assert copies.num_bytes["out"] > copies.num_bytes["back"] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("keep", Keep)
def test_on_a_gpu(keep: Keep) -> None:
    device = torch.device("cuda")
    plain, ours = (Net().to(device) for _ in range(2))
    for net in (plain, ours):
        net.x, net.mask = (each.repeat(64, 1).to(device) for each in (net.x, net.mask))
    offload = Offload(device, 1, StreamCopies(device))
    for block in ours.blocks:
        install(block, BlockForward(block, keep, offload))
    for _ in range(3):
        assert_equal(step_of(ours, ours.loss), step_of(plain, plain.loss))
