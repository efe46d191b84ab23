"""Values that a fake environment provides. A dry run has no side effects."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import roomier
from roomier.api.adapt import as_module
from roomier.api.module import network_of
from roomier.core import torch_fake, torch_private
from roomier.core.errors import RoomierError
from roomier.core.mesh import Mesh
from roomier.planner.dry_runs.dry_run import dry_run
from roomier.planner.fake.fake_world import fake_world
from roomier.planner.fake.rnn import workspace_bytes
from roomier.planner.fake.shapes import shapes_of, shapes_of_batch
from roomier.planner.workload import Workload
from tests.planner.models import MODELS
from tests.planner.test_dry_run import ALLOWED, plan_of
from tests.planner.truth import measured_peak

pytestmark = pytest.mark.more

IDS = torch.tensor([[3, 1, 4], [1, 5, 9]])
SHAPED_BY_VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nonzero": lambda ids, x: (ids > 2).nonzero(),
    "where": lambda ids, x: torch.where(ids == 1)[0],
    "a mask": lambda ids, x: x[ids > 2],
    "a mask among others": lambda ids, x: x[:, ids[0] > 1, 0:1],
    "masked_select": lambda ids, x: x[:, :, 0].masked_select(ids > 1),
    "unique": lambda ids, x: ids.unique(),
    "repeat_interleave": lambda ids, x: x.repeat_interleave(ids[:, 0], dim=0),
    "bincount": lambda ids, x: ids.flatten().bincount(),
    "one_hot": lambda ids, x: F.one_hot(ids),
    "lengths": lambda ids, x: x[: int(ids.max()) - 7],
    "written values": lambda ids, x: x[: int(ids.clone().fill_(1).sum()) - 4],
    "flags of floats": lambda ids, x: x[: 1 + int(torch.isfinite(x).all()) + int(torch.isnan(x).any())],
    "flags as one integer": lambda ids, x: torch.signbit(x).view(torch.int64),
    "tolist": lambda ids, x: torch.empty(ids[0].tolist()),
}


@pytest.mark.parametrize("name", SHAPED_BY_VALUES)
def test_shapes_that_depend_on_integers_equal_the_shapes_of_the_run(name: str) -> None:
    x = torch.ones(2, 3, 8)
    truth = SHAPED_BY_VALUES[name](IDS, x).shape
    with fake_world(Mesh(), is_pairwise=True):
        ids, fake = shapes_of_batch((IDS, x))
        assert SHAPED_BY_VALUES[name](ids, fake).shape == truth


class Eager(roomier.Module):
    """Experts that run one after the other, each with the tokens routed to it."""

    def __init__(self, num_experts: int = 4, width: int = 32) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_experts))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, chosen = self.router(batch).topk(2, dim=-1)
        hits = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        result = torch.zeros_like(batch)
        for index in (hits.sum(dim=(1, 2)) > 0).nonzero().flatten().tolist():
            _, tokens = torch.where(hits[index])
            self.num_tokens.append(len(tokens))
            result = result.index_add(0, tokens, self.experts[index](batch[tokens]))
        return result.sum()

    num_tokens: list[int] = []  # noqa: RUF012 - shared with copies


def test_experts_are_assumed_to_have_equal_load() -> None:
    Eager.num_tokens.clear()
    dry_run(Workload.of(Eager(), torch.ones(16, 32)), plan_of({}))
    assert set(Eager.num_tokens) == {8}
    assert len(Eager.num_tokens) == 8  # four experts in each of two steps


class Reads(roomier.Module):
    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.read = read

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).sum()
        self.read(loss)
        return loss


def fails(loss: Tensor) -> None:
    raise KeyError("labels")


@pytest.mark.parametrize(
    ("read", "words"), [(lambda loss: loss.detach().numpy(), "reads the memory"), (fails, "raises KeyError: ")]
)
def test_a_step_that_requires_values_is_rejected_with_its_line(read: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(RoomierError, match=words) as raised:
        dry_run(Workload.of(Reads(read), torch.ones(2, 4)), plan_of({}))
    assert f"{Path(__file__)}:" in str(raised.value)
    assert "measure a step" in str(raised.value)


def test_a_dry_run_does_not_change_model_generators_or_settings() -> None:
    module, batch = MODELS["resnet"]()
    first = next(module.parameters())
    first.grad = torch.ones_like(first)
    before = copy.deepcopy(module.state_dict())
    generators = (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False))
    settings = (torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_grad_enabled())
    kernels = (torch._VF.lstm, F.scaled_dot_product_attention)
    dry_run(Workload.of(as_module(module), batch), plan_of({"precision": {"mode": "bf16-true"}}), like="cuda")
    for name, each in module.state_dict().items():
        assert torch.equal(each, before[name]), name
    assert torch.equal(first.grad, torch.ones_like(first))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    np.testing.assert_equal(np.random.get_state(legacy=False), generators[2])
    assert settings == (torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_grad_enabled())
    assert kernels == (torch._VF.lstm, F.scaled_dot_product_attention)


class Odd(roomier.Module):
    """Parametrizations, tensors in plain attributes, and buffers that share memory."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations = nn.utils.parametrizations
        self.normed = parametrizations.weight_norm(nn.Linear(64, 64))
        self.spectral = parametrizations.spectral_norm(nn.Linear(64, 64))
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        table = torch.ones(128, 64)
        self.register_buffer("table", table)
        self.register_buffer("part", table[:64])
        self.register_buffer("wide", torch.ones(1, 64).expand(1000, 64))
        self.plain = {"scale": torch.full((64, 64), 2.0)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.second(self.first(self.spectral(self.normed(batch)))) @ self.plain["scale"]
        return (x @ self.part + self.wide[: len(x)]).square().mean()


def test_tensors_that_are_shared_computed_or_in_attributes_count_as_in_the_run() -> None:
    module, batch = Odd(), torch.ones(32, 64)
    truth = measured_peak(module, batch, plan_of({}))
    found = dry_run(Workload.of(module, batch), plan_of({})).peak
    assert found.peak_bytes == pytest.approx(truth.total(), rel=ALLOWED)


class Later(roomier.Module):
    def configure_model(self) -> None:
        self.layer = nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).sum()
        return loss


@pytest.mark.parametrize("mode", ["32-true", "bf16-true"])
def test_configure_model_runs_only_in_the_copy(mode: str) -> None:
    module, built = Later(), Later()
    built.configure_model()
    plan = plan_of({"precision": {"mode": mode}})
    found = dry_run(Workload.of(module, torch.ones(2, 8)), plan)
    assert found.peak_bytes == dry_run(Workload.of(built, torch.ones(2, 8)), plan).peak_bytes
    assert not list(module.parameters())


def test_lazy_layers_are_rejected_with_their_name() -> None:
    module = as_module(nn.Sequential(nn.LazyLinear(4)))
    with pytest.raises(RoomierError, match=r"network\.0\.weight.*is lazy"):
        dry_run(Workload.of(module, torch.ones(2, 4)), plan_of({}))


def test_a_trained_model_has_the_forecast_of_a_new_one(make_trainer: Callable[..., roomier.Trainer]) -> None:
    module, batch = MODELS["gpt_tied"]()
    workload = Workload.of(as_module(module), batch)
    plan = plan_of({"activation": {"policy": "full"}})
    fresh = dry_run(workload, plan).peak_bytes
    trainer = make_trainer(max_steps=1, optimizer="adamw", activation_checkpointing="full", chunked_loss=True)
    trainer.fit(module, [batch])
    assert dry_run(workload, plan).peak_bytes == fresh
    assert not any(torch_fake.is_fake([each]) for each in module.parameters())


def test_a_padding_mask_that_hides_no_token_is_skipped_as_in_the_run() -> None:
    module, batch = MODELS["bert"]()
    plan = plan_of({})
    batch = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    truth = measured_peak(module, batch, plan)
    assert dry_run(Workload.of(as_module(module), batch), plan).peak_bytes == truth.total()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(5, 2, 8, 8), (20, 2, 8, 8), (64, 4, 96, 64), (33, 7, 50, 70), (16, 16, 300, 256)])
def test_the_workspace_of_an_lstm_has_the_size_that_its_kernel_allocates(
    sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    length, num_sequences, width_in, width = sizes
    found: list[int] = []

    def see(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            found.append(result[3].nbytes)
        return result

    layer = nn.LSTM(width_in, width).to(dtype)
    with torch_private.intercept(see):
        layer(torch.ones(length, num_sequences, width_in, dtype=dtype))
    if not found:
        pytest.skip(f"this CPU computes an LSTM in {dtype} without the fused kernel whose bytes are modeled")
    assert found == [workspace_bytes(*sizes, dtype.itemsize)]


class Attends(roomier.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.layer(batch)
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        return self.norm(self.layer(y.transpose(1, 2).flatten(2))).square().mean()


def test_like_cuda_attention_with_dropout_saves_no_scores() -> None:
    workload = Workload.of(Attends(), torch.ones(2, 128, 64))
    on_cpu, on_cuda = (dry_run(workload, plan_of({}), like=like).peak_bytes for like in ("cpu", "cuda"))
    scores_bytes = 2 * 4 * 128 * 128 * 4  # samples, heads, tokens, tokens, float32
    assert on_cpu - on_cuda > 2 * scores_bytes
    named = plan_of({"attention": {"kernel": "math"}})
    assert dry_run(workload, named, like="cuda").peak_bytes == dry_run(workload, named).peak_bytes


def test_like_cuda_norms_compute_in_float32_under_autocast() -> None:
    class Norms(Attends):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = self.layer(batch)
            for _ in range(4):
                x = F.gelu(self.norm(x).to(x.dtype))
            return self.layer(x).mean()

    workload = Workload.of(Norms(), torch.ones(8, 128, 64))
    mixed, exact = plan_of({"precision": {"mode": "bf16-mixed"}}), plan_of({})
    on_cpu, on_cuda = (dry_run(workload, mixed, like=like).peak_bytes for like in ("cpu", "cuda"))
    assert on_cuda - on_cpu >= 4 * 8 * 128 * 64 * 2
    assert dry_run(workload, exact, like="cuda").peak_bytes == dry_run(workload, exact).peak_bytes


@pytest.mark.parametrize("like", ["cuda", "xpu"])
def test_accelerators_keep_the_softmax_of_cross_entropy_in_16_bits_under_autocast(like: str) -> None:
    class Classifies(roomier.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4096, bias=False)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.layer(batch), torch.zeros(len(batch), dtype=torch.int64))

    workload = Workload.of(Classifies(), torch.ones(512, 8))
    mixed, exact = plan_of({"precision": {"mode": "bf16-mixed"}}), plan_of({})
    on_cpu, on_device = (dry_run(workload, mixed, like=each).peak_bytes for each in ("cpu", like))
    # A CPU has three tensors in float32: the softmax, its gradient and the gradient of the logits. An accelerator has
    # the softmax in 16 bits, its copy in float32 and the gradient of the copy.
    assert on_cpu - on_device == pytest.approx(512 * 4096 * 2, rel=0.01)
    assert dry_run(workload, exact, like=like).peak_bytes == dry_run(workload, exact).peak_bytes


def test_like_cuda_applies_to_recomputation() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.softmax(self.layer(x), -1)  # float32 in CUDA's autocast, 16 bits in a CPU's

    class Blocks(roomier.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            for block in self.blocks:
                batch = block(batch)
            return batch.mean()

    workload = Workload.of(Blocks(), torch.ones(64, 16))
    plan = plan_of({"precision": {"mode": "bf16-mixed"}, "activation": {"policy": "full"}})
    whole = plan_of({"precision": {"mode": "bf16-mixed"}})
    assert dry_run(workload, plan, like="cuda").peak_bytes < dry_run(workload, whole, like="cuda").peak_bytes


def test_like_cuda_optimizers_update_all_parameters_together() -> None:
    module = as_module(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)), nn.Flatten(0), nn.Linear(64, 1)))
    plan = plan_of({"optimizer": {"name": "rmsprop"}})
    on_cpu, on_cuda = (
        max(each.peak_bytes for each in dry_run(Workload.of(module, torch.ones(64)), plan, like=like).intervals)
        for like in ("cpu", "cuda")
    )
    assert on_cuda - on_cpu > 4 * 64 * 64 * 4


def test_data_in_attributes_is_not_copied() -> None:
    network = nn.Linear(2, 2)
    data, losses = np.zeros(2**20), np.zeros(8)
    held: dict[str, Any] = {"data": data, "losses": losses, "set": TensorDataset(torch.zeros(4, 2))}
    network.__dict__.update(held)
    with fake_world(Mesh(), is_pairwise=True):
        copied: Any = network_of(shapes_of(as_module(network)))
    assert copied.data is data
    assert copied.set is held["set"]
    assert copied.losses is not losses, "a step may write into it"


def test_copied_parameters_are_fake() -> None:
    module, _ = MODELS["gpt"]()
    with fake_world(Mesh(), is_pairwise=True):
        copied = shapes_of(as_module(module))
        assert all(torch_fake.is_fake([each]) for each in copied.parameters())
