"""Training on the simulated device computes the same bits as training on the CPU, without waits of the host."""

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.simulator import simulated
from tests.simulator.gpt import GPT, batches
from tests.simulator.workers import SimulatedRanks

DEVICE = simulated.DEVICE
SCHEDULES = ("LATE", "OTHERS_FIRST", "IMMEDIATE")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=3e-3, foreach=False),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=3e-3, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=3e-3, fused=True),
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=3e-2, momentum=0.9, fused=True),
}


def train(model: nn.Module, optimizer: str, device: str, dtype: torch.dtype | None, steps: int = 5) -> list[float]:
    """Return the losses. From the third step on, the host must not wait for the device."""
    model.to(device)
    update = OPTIMIZERS[optimizer](model.parameters())
    losses = []
    for step, batch in enumerate(batches(steps)):
        is_strict = device == DEVICE and step >= 2
        with simulated.forbidden_host_waits() if is_strict else contextlib.nullcontext():
            tokens = batch if device == "cpu" else batch.pin_memory().to(device, non_blocking=True)
            with torch.autocast(device, dtype) if dtype else contextlib.nullcontext():
                loss = model(tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update.step()
            update.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def compare_with_cpu(optimizer: str, dtype: torch.dtype | None) -> dict[str, Any]:
    on_cpu = GPT()
    on_device = copy.deepcopy(on_cpu)
    simulated.clear()
    losses = train(on_device, optimizer, DEVICE, dtype), train(on_cpu, optimizer, "cpu", dtype)
    pairs = zip(on_device.parameters(), on_cpu.parameters(), strict=True)
    return {
        "losses": losses,
        "tied": on_device.head.weight is on_device.tokens.weight,
        "differences": [(a.detach().cpu() - b.detach()).abs().max().item() for a, b in pairs],
        "races": simulated.races(),
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_in_fp32_computes_the_bits_of_the_cpu(
    on_simulated: SimulatedRanks, optimizer: str, schedule: str
) -> None:
    (found,) = on_simulated(1, compare_with_cpu, optimizer, None, schedule=schedule)
    assert found["races"] == []
    assert found["tied"]
    assert max(found["differences"]) == 0
    on_device, on_cpu = found["losses"]
    assert on_device == on_cpu
    assert len(set(on_device)) == 5


def test_autocast_trains(on_simulated: SimulatedRanks) -> None:
    (found,) = on_simulated(1, compare_with_cpu, "adamw-fused", torch.bfloat16)
    on_device, on_cpu = found["losses"]  # the CPU runs different operations in bf16
    assert on_device == pytest.approx(on_cpu, rel=2e-2)
    assert found["races"] == []


def dtypes_under_autocast() -> list[torch.dtype]:
    x, weight = torch.randn(2, 4, device=DEVICE), torch.randn(4, 4, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = F.linear(x, weight)
        results = [y, y @ weight, F.layer_norm(y, (4,)), y.sum(), y.softmax(-1), torch.addcmul(x, y, y), y + y]
    return [each.dtype for each in results]


def test_autocast_uses_the_lists_of_cuda(on_simulated: SimulatedRanks) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    assert on_simulated(1, dtypes_under_autocast) == [[bf16, bf16, fp32, fp32, fp32, fp32, bf16]]


KERNELS: dict[str, Callable[[Tensor], Any]] = {
    "transposed sum": lambda x: x.mT + x.mT,
    "matmul": lambda x: x @ x.mT,
    "softmax": lambda x: x.mT.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x.mT.contiguous().mT, x.shape[-1:]),
    "layer norm in bf16": lambda x: F.layer_norm(x.bfloat16(), x.shape[-1:]),
    "native layer norm in bf16": lambda x: torch.native_layer_norm(x.bfloat16(), x.shape[-1:], None, None, 1e-5),
    "group norm": lambda x: F.group_norm(x, 2),
    "convolution": lambda x: F.conv2d(x[None].to(memory_format=torch.channels_last), x[None, :, :3, :3]),
    "convolution backward": lambda x: gradients(
        F.conv2d, x[None], x[None, :, :3, :3].expand(2, -1, -1, -1), x[0, 0, :2]
    ),
    "transposed convolution": lambda x: gradients(
        F.conv_transpose2d, x[None], x[:, None, :3, :3].expand(-1, 2, -1, -1), x[0, 0, :2]
    ),
    "sort": lambda x: x.sort(-1),
    "top k": lambda x: x.topk(2),
    "cumulative sum": lambda x: x.mT.cumsum(-1),
    "gather": lambda x: x.gather(-1, x.argsort(-1)),
    "index": lambda x: x[:, torch.zeros(2, dtype=torch.long, device=x.device)],
    "mask": lambda x: x[x > 0],
    "norm": lambda x: torch.linalg.vector_norm(x.mT, dim=-1),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2)) * 2j),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + 20 * torch.eye(x.shape[-2], device=x.device)),
    "unique": lambda x: (x > 0).long().unique(return_counts=True),
    "arange": lambda x: torch.arange(0.5, 3.2, 0.3, device=x.device),
    "empty": lambda x: x[:0].sum(0),
}


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return the result of ``function`` and the gradients of its inputs."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    result = function(*leaves)
    result.square().sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def shown(value: Any) -> list[tuple[Any, ...]]:
    tensors = [value] if isinstance(value, Tensor) else list(value)
    return [(each.dtype, each.stride(), each.shape, each.cpu().contiguous()) for each in tensors]


def results_of_kernels() -> dict[str, tuple[Any, Any]]:
    x = torch.randn(4, 6, 6)
    return {name: (shown(use(x.to(DEVICE))), shown(use(x))) for name, use in KERNELS.items()}


def test_kernels_return_bits_strides_and_dtypes_of_the_cpu(on_simulated: SimulatedRanks) -> None:
    for name, (on_device, on_cpu) in on_simulated(1, results_of_kernels)[0].items():
        for (*form, numbers), (*form_on_cpu, numbers_on_cpu) in zip(on_device, on_cpu, strict=True):
            assert form == form_on_cpu, name
            assert torch.equal(numbers, numbers_on_cpu), name


def scale_gradients() -> Iterator[tuple[bool, float]]:
    for factor in (1.0, float("inf")):
        layer = nn.Linear(4, 4).to(DEVICE)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler(DEVICE)
        with torch.autocast(DEVICE, torch.float16):
            loss = layer(torch.randn(2, 4, device=DEVICE) * factor).float().mean()
        before = layer.weight.detach().cpu()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        yield torch.equal(before, layer.weight.detach().cpu()), scaler.get_scale()


def all_scales() -> list[tuple[bool, float]]:
    return list(scale_gradients())


def test_the_gradient_scaler_skips_infinite_gradients(on_simulated: SimulatedRanks) -> None:
    assert on_simulated(1, all_scales) == [[(False, 65536.0), (True, 32768.0)]]


def compare_checkpointing() -> list[bool]:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()).to(DEVICE)

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.full((4, 8), 0.5, device=DEVICE, requires_grad=True)
        torch.manual_seed(0)
        run(x).sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    expected = gradient(layer)
    variants = [lambda x, kind=kind: checkpoint(layer, x, use_reentrant=kind) for kind in (True, False)]
    return [torch.equal(gradient(each), expected) for each in variants]


def test_recomputation_restores_the_random_state(on_simulated: SimulatedRanks) -> None:
    assert on_simulated(1, compare_checkpointing) == [[True, True]]


def random_numbers() -> dict[str, bool]:
    def draw() -> list[float]:
        return torch.rand(4, device=DEVICE).tolist()

    module = torch.get_device_module(DEVICE)
    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    found = {"seed": draw() == first and first != second}
    state = module.get_rng_state()
    third = draw()
    module.set_rng_state(state)
    with torch.random.fork_rng([0], device_type=DEVICE):
        found["fork_rng"] = draw() == third
    found["state"] = draw() == third
    numbers = [
        torch.randperm(5, device=DEVICE, generator=torch.Generator(device=DEVICE).manual_seed(1)).tolist() for _ in "ab"
    ]
    host = torch.rand(1)
    torch.manual_seed(3)
    kept = F.dropout(torch.ones(1000, device=DEVICE), 0.25)
    found["dropout"] = 0.7 < (kept != 0).float().mean().item() < 0.8
    found["generator"] = numbers[0] == numbers[1] and sorted(numbers[0]) == list(range(5))
    torch.manual_seed(3)
    found["host unaffected"] = torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(3)))
    return found | {"host": host.numel() == 1}


def test_random_numbers_follow_seed_and_state(on_simulated: SimulatedRanks) -> None:
    assert all(on_simulated(1, random_numbers)[0].values())


def save_and_load() -> list[Any]:
    file = io.BytesIO()
    saved = {"a": torch.arange(4.0, device=DEVICE), "model": GPT().to(DEVICE).state_dict()}
    torch.save(saved, file)
    found = []
    for location in (None, "cpu", DEVICE):
        file.seek(0)
        loaded = torch.load(file, weights_only=True, map_location=location)
        found.append((loaded["a"].device.type, loaded["a"].tolist()))
    copied = copy.deepcopy(nn.Linear(2, 2).to(DEVICE))
    return [*found, DEVICE in repr(copied.weight)]


def test_tensors_are_saved_and_loaded(on_simulated: SimulatedRanks) -> None:
    numbers = [0.0, 1.0, 2.0, 3.0]
    expected = [(DEVICE, numbers), ("cpu", numbers), (DEVICE, numbers), True]
    assert on_simulated(1, save_and_load) == [expected]
