"""Training with parameters in a tier computes the same bits as training with parameters on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from roomier.api.blocks import find_blocks
from roomier.core.errors import PlanError, TrainingError
from roomier.core.wrapped_forward import unwrap
from roomier.techniques.offload.parameters import OffloadedParameters
from roomier.techniques.offload.regions import Region, regions_of
from roomier.techniques.offload.residency import UPDATE, absent_watch, record_sizes
from tests.activation.kinds import KINDS, Loss, make_gpt
from tests.activation.steps import ALONE, CPU
from tests.covering import few
from tests.offload.checking_tier import CheckingTier


@dataclass
class Case:
    """Settings of a training run.

    Attributes:
        make: function that returns a network and its loss.
        recompute: policy of recomputation.
        activations: location of the saved activations.
        dtype: dtype of autocast.
        num_micro_batches: number of micro-batches per step.
        evaluates: True if an evaluation runs after each step.
        max_norm: upper limit for the norm of the gradients.
    """

    make: Callable[[], tuple[nn.Module, Loss]] = make_gpt
    recompute: str = "none"
    activations: str = "none"
    dtype: torch.dtype | None = None
    num_micro_batches: int = 1
    evaluates: bool = False
    max_norm: float | None = None


@dataclass
class Result:
    """Losses, norms of gradients, and final weights of a training run."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def stays_nowhere(module: nn.Module) -> bool:
    return False


def offloaded(network: nn.Module, num_buffers: int = 3, min_bytes: int = 1) -> tuple[OffloadedParameters, CheckingTier]:
    blocks = find_blocks(network)
    regions = regions_of(network, blocks, min_bytes, stays_nowhere)
    tier = CheckingTier(record_sizes(regions), num_buffers)
    parameters = OffloadedParameters(network, blocks, regions, tier, CPU)
    parameters.install()
    return parameters, tier


def train(case: Case, steps: int, *, offloads: bool) -> Result:
    from roomier.plan.parts import ActivationPlan, OffloadPlan
    from roomier.techniques.activation.recompute import apply_recompute

    torch.manual_seed(0)
    network, loss = case.make()
    blocks, own = find_blocks(network), list(network.parameters())
    parameters = offloaded(network)[0] if offloads else None
    apply_recompute(
        blocks, ActivationPlan(policy=case.recompute), OffloadPlan(activations=case.activations), CPU, ALONE
    )
    optimizers: dict[Region | None, torch.optim.Optimizer] = {}
    if parameters is not None:
        parameters.gradients.measures_norms = case.max_norm is not None
        optimizers = {region: adamw(region.parameters) for region in parameters.regions}
        own = [each for each in own if parameters.region_of(each) is None]
    if own:
        optimizers[None] = adamw(own)
    result = Result()
    torch.manual_seed(1)
    for _ in range(steps):
        if parameters is not None:
            parameters.gradients.begin_step()
        for _ in range(case.num_micro_batches):
            with nullcontext() if case.dtype is None else torch.autocast("cpu", case.dtype):
                value = loss()
            value.backward()
            result.losses.append(value.detach())
            if parameters is not None:
                parameters.gradients.leave_complete()
        update(case, network, optimizers, parameters, result)
        if case.evaluates:
            network.eval()
            with torch.no_grad(), nullcontext() if case.dtype is None else torch.autocast("cpu", case.dtype):
                result.losses.append(loss())
            network.train()
    if parameters is not None:
        parameters.close()
    unwrap(network)
    result.weights = {name: each.detach().clone() for name, each in network.named_parameters()}
    return result


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def update(
    case: Case,
    network: nn.Module,
    optimizers: dict[Region | None, torch.optim.Optimizer],
    parameters: OffloadedParameters | None,
    result: Result,
) -> None:
    factor = None
    if case.max_norm is not None:
        norms = gradient_norms(network, parameters)
        total = torch.linalg.vector_norm(torch.stack(norms))
        factor = (case.max_norm / (total + 1e-6)).clamp(max=1.0)
        result.norms.append(total)
    for region, optimizer in optimizers.items():
        if region is not None:
            assert parameters is not None
            parameters.use((region,), UPDATE)
            parameters.gradients.arrive(region)
        for group in optimizer.param_groups:
            for each in group["params"]:
                if factor is not None and each.grad is not None:
                    each.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
        if region is not None:
            parameters.changed(region)
            parameters.gradients.forget(region)
    if parameters is not None:
        for each in parameters.regions:
            parameters.gradients.forget(each)
        parameters.gradients.norms.clear()


def gradient_norms(network: nn.Module, parameters: OffloadedParameters | None) -> list[Tensor]:
    left = {} if parameters is None else parameters.gradients.norms
    found: list[Tensor] = []
    for each in network.parameters():
        if each in left:
            assert each.grad is None
            found.append(left[each])
        elif each.grad is not None:
            found.append(torch.linalg.vector_norm(each.grad))
    return found


def assert_same(case: Case, steps: int) -> Result:
    expected, found = train(case, steps, offloads=False), train(case, steps, offloads=True)
    assert torch.equal(torch.stack(found.losses), torch.stack(expected.losses))
    assert found.weights.keys() == expected.weights.keys()
    assert [name for name in found.weights if not torch.equal(found.weights[name], expected.weights[name])] == []
    assert all(map(torch.equal, found.norms, expected.norms))
    return found


CASES = {
    "plain": Case(),
    "recompute": Case(recompute="full", evaluates=True),
    "selective": Case(recompute="selective"),
    "offloaded activations": Case(activations="cpu"),
    "bf16-mixed": Case(dtype=torch.bfloat16, evaluates=True),
    "bf16-mixed, recompute": Case(dtype=torch.bfloat16, recompute="full"),
    "accumulation": Case(num_micro_batches=3),
}


@pytest.mark.parametrize("name", few(CASES, 3))
def test_twenty_steps(name: str) -> None:
    assert_same(CASES[name], 20)


@pytest.mark.parametrize("kind", few(KINDS, 3))
def test_kinds_of_models(kind: str) -> None:
    assert_same(Case(KINDS[kind], recompute="none"), 3)
    assert_same(Case(KINDS[kind], recompute="full", dtype=torch.bfloat16, num_micro_batches=2), 3)


WIDTH = 16
X = torch.linspace(-1, 1, 8 * WIDTH).sin().view(8, WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(torch.relu_(self.up(self.norm(x)))))
        return y


class Net(nn.Module):
    """Network with three blocks between two layers. Subclasses change one property."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def order(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        for block in self.order():
            x = block(x)
        return self.last(x).square().mean()


class RunsTwice(Net):
    """Network whose first block runs three times, twice after another block."""

    def order(self) -> list[nn.Module]:
        return [self.blocks[0], self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2]]


class Tied(Net):
    """Network in which two blocks and two outer layers share weights."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.first.weight
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Frozen(Net):
    """Network in which one block is frozen, and one block is partly frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].down.requires_grad_(False)
        self.first.requires_grad_(False)


class Side(Block):
    """A block with a loss that is not in its output."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.extra = self.up(y).square().mean()
        return y


class SideLoss(Net):
    def __init__(self) -> None:
        super().__init__(Side)

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        for block in self.blocks:
            loss = loss + block.extra
        return loss


class Checkpointed(Block):
    """A block that recomputes a part of itself."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        return result


class Reentrant(Block):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)
        return result


class Parametrized(Block):
    """A block whose weights are computed from parameters, in a hook before the forward."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.up)
        self.register_forward_pre_hook(lambda block, args: (args[0] * block.down.weight.mean(),))


class Sometimes(Net):
    """Network in which one block is skipped in two of three steps, and the order of the blocks changes."""

    num_calls = 0

    def order(self) -> list[nn.Module]:
        Sometimes.num_calls += 1
        first, second, third = self.blocks
        return [first, second, third] if Sometimes.num_calls % 3 == 0 else [third, first]


class Writes(Block):
    """A block that changes a parameter in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.down.bias.mul_(0.5)
        return super().forward(x)


NETS: dict[str, Callable[[], nn.Module]] = {
    "runs twice": RunsTwice,
    "tied": Tied,
    "frozen": Frozen,
    "side loss": SideLoss,
    "checkpoint": lambda: Net(Checkpointed),
    "reentrant checkpoint": lambda: Net(Reentrant),
    "parametrized": lambda: Net(Parametrized),
    "sometimes": Sometimes,
    "writes": lambda: Net(Writes),
}


@pytest.mark.more
@pytest.mark.parametrize("name", NETS)
def test_kinds_of_networks(name: str) -> None:
    def make() -> tuple[nn.Module, Loss]:
        Sometimes.num_calls = 0
        network = NETS[name]()
        x = X.clone().requires_grad_(name == "reentrant checkpoint")
        return network, lambda: network(x)

    for recompute in ("none", "full"):
        for dtype in (None, torch.bfloat16):
            assert_same(Case(make, recompute, dtype=dtype, num_micro_batches=2, max_norm=0.1), 4)


def test_one_region_is_in_memory_and_unchanged_parameters_are_not_written() -> None:
    torch.manual_seed(0)
    network = Net()
    parameters, tier = offloaded(network)
    num_regions = len(parameters.regions)
    assert [region.name for region in parameters.regions] == ["first", *(f"blocks.{i}" for i in range(3)), "last"]
    assert parameters.region_of(network.scale) is None, "the root module reads it"
    most, casts = 0, 0

    def count(*_: object) -> None:
        nonlocal most, casts
        most = max(most, sum(parameters._memory[each].is_here for each in parameters.regions))
        living = [storage for each in parameters._casts.values() for storage, _ in each._living()]
        casts = max(casts, sum(storage.nbytes() > 0 for storage in living))

    for block in network.blocks:
        block.dropout.register_forward_pre_hook(count)
        block.dropout.register_full_backward_hook(count)
    tier.num_reads = tier.num_writes = 0
    parameters.gradients.begin_step()
    with torch.autocast("cpu", torch.bfloat16):
        loss = network(X)
    loss.backward()
    parameters.gradients.leave_complete()
    assert (most, casts) == (1, 2), "only the weights of the current block exist, and their copies in bfloat16"
    # The last region stays in memory for its backward, and the first region is in memory after the backward.
    assert (tier.num_reads, tier.num_writes) == (2 * num_regions - 1, num_regions), "each write is a gradient"
    assert all(each.grad is None for each in network.parameters() if parameters.region_of(each) is not None)
    parameters.release()
    assert not any(parameters._memory[each].is_here for each in parameters.regions)


def test_small_regions_stay() -> None:
    network = Net()
    parameters, _ = offloaded(network, min_bytes=4096)
    assert [region.name for region in parameters.regions] == [f"blocks.{i}" for i in range(3)]


def test_a_model_without_blocks_is_rejected() -> None:
    with pytest.raises(PlanError, match="requires blocks"):
        OffloadedParameters(nn.Linear(2, 2), [], [], CheckingTier([]), CPU)


class ReadsOutside(Net):
    """A network that reads weights of a block outside the forward of the block."""

    def forward(self, x: Tensor) -> Tensor:
        penalty = self.blocks[1].up.weight.t().square().mean()
        return super().forward(x) + penalty


def test_reads_outside_the_forward_raise_an_error_or_return_nan() -> None:
    network = ReadsOutside()
    parameters, _ = offloaded(network)
    message = r"offload.parameters='blocks.1.up.weight': was read while its module was not running"
    with pytest.raises(TrainingError, match=message), absent_watch(parameters):
        network(X)
    assert network(X).isnan(), "without the watch, the result is NaN, and freed memory is not accessed"
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        network.blocks[0].up.weight.add_(1)
    working = Net()
    other, _ = offloaded(working)
    with absent_watch(other):
        working(X).backward()


def test_an_error_in_a_forward_keeps_no_region() -> None:
    torch.manual_seed(0)
    network = Net()
    expected = network.eval()(X)
    parameters, _ = offloaded(network)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            network(X[:, 1:])
        with pytest.raises(RuntimeError):
            network.blocks[1](X[:, 1:])
        assert (
            sum(parameters._memory[each].is_here for each in parameters.regions) <= 2
        )  # this region and the next region
    assert torch.equal(network(X), expected)


def test_stored_parameters_are_read_and_written_in_the_tier() -> None:
    torch.manual_seed(0)
    network = Net()
    before = {name: each.detach().clone() for name, each in network.named_parameters()}
    parameters, _ = offloaded(network)
    network(X)
    parameters.settle()
    names = {each: name for name, each in network.named_parameters()}
    for parameter, content in parameters.stored():
        assert torch.equal(content, before[names[parameter]])
        content.add_(1)
    assert not any(parameters._memory[each].is_here for each in parameters.regions)
    parameters.close()
    unwrap(network)
    for name, each in network.named_parameters():
        assert torch.equal(each, before[name] + (name != "scale"))
    assert network(X).requires_grad


def test_writes_to_saved_tensors_are_detected() -> None:
    class Wrong(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(self.up(x))
            z: Tensor = self.down(y.square())
            y.zero_()
            return z

    network = Net(Wrong)
    offloaded(network)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        network(X).backward()
