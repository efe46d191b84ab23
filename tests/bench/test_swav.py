"""SwAV and its ResNet: sizes, assignments, the queue, the loss, and learning without labels."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.models.resnet import ResNet
from benchmarks.models.swav import SwAV, SwAVConfig, sinkhorn
from roomier.core.errors import RoomierError
from tests.ranks.pool import RankPool

SMALL = SwAVConfig((1, 1, 1, 1), 4, hidden_width=16, embedding_width=8, num_prototypes=6, queue_length=10)


def small_model(**changes: object) -> SwAV:
    torch.manual_seed(0)
    return SwAV(replace(SMALL, **changes))  # type: ignore[arg-type]


def crops(num_views: int, size: int, num_images: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(num_images, num_views, 3, size, size, generator=torch.Generator().manual_seed(seed))


def unit_rows(num_rows: int, seed: int = 2) -> Tensor:
    rows = torch.randn(2, num_rows, 8, generator=torch.Generator().manual_seed(seed))
    return rows / rows.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(("channels", "published"), [(64, 25_557_032 - 2048 * 1000 - 1000), (128, 94e6)])
def test_trunk_has_the_published_number_of_parameters(channels: int, published: float) -> None:
    """ResNet-50 without its classifier, and RN50w2 with 94 million parameters (SwAV, figure 3)."""
    with torch.device("meta"):
        num_parameters = sum(each.numel() for each in ResNet(channels=channels).parameters())
    assert num_parameters == published if channels == 64 else num_parameters == pytest.approx(published, rel=0.01)


def test_features_do_not_depend_on_the_image_size() -> None:
    trunk = ResNet((1, 2, 1, 1), channels=4)
    assert [trunk(torch.randn(2, 3, size, size)).shape for size in (32, 64)] == [(2, trunk.num_features)] * 2
    assert trunk.num_features == 4 * 8 * 4


def test_assignments_use_all_prototypes_equally() -> None:
    scores_RK = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plan_RK = sinkhorn(scores_RK, torch.ones(12, dtype=torch.float64), 0.5, 200)
    torch.testing.assert_close(plan_RK.sum(1), torch.ones(12, dtype=torch.float64))
    torch.testing.assert_close(plan_RK.sum(0), torch.full((4,), 3.0, dtype=torch.float64))
    # The optimum has the form u * exp(scores / epsilon) * v, so its logarithm differs from the scores by a row and a
    # column.
    rest_RK = plan_RK.log() - scores_RK / 0.5
    rest_RK = rest_RK - rest_RK[:1] - rest_RK[:, :1] + rest_RK[0, 0]
    assert rest_RK.abs().max() < 1e-9


def test_rows_without_weight_do_not_affect_an_assignment() -> None:
    scores_RK = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    weights_R = torch.tensor([1.0, 1, 0, 1, 1, 0, 1, 0, 1])
    plan_RK = sinkhorn(scores_RK, weights_R, 0.05, 3)
    is_valid_R = weights_R.bool()
    alone_RK = sinkhorn(scores_RK[is_valid_R], torch.ones(6), 0.05, 3)
    torch.testing.assert_close(plan_RK[is_valid_R], alone_RK)
    assert not plan_RK[~is_valid_R].any()


def test_queue_contains_the_newest_embeddings_and_takes_part_in_assignments() -> None:
    model, without = small_model(), small_model(queue_length=0)
    first, second, third = (unit_rows(4, seed) for seed in (3, 4, 5))
    for with_empty_queue, alone in zip(model.assign(first), without.assign(first), strict=True):
        torch.testing.assert_close(with_empty_queue, alone)
    model.assign(second)
    model.assign(third)
    assert torch.equal(model.queue, torch.cat([third, second, first], dim=1)[:, :10])
    model.eval()
    before = model.queue.clone()
    together = without.assign(torch.cat([first, before], dim=1))
    for with_queue, expected in zip(model.assign(first), together, strict=True):
        torch.testing.assert_close(with_queue, expected[:4])
    assert torch.equal(model.queue, before)


def assignments_of_rank(embeddings_VMD: Tensor) -> tuple[list[Tensor], Tensor]:
    model, own = small_model(), embeddings_VMD.chunk(2, dim=1)[dist.get_rank()]
    model.assign(own)
    return model.assign(own), model.queue


@pytest.mark.more
def test_assignments_on_two_ranks_equal_one_process(on_ranks: RankPool) -> None:
    embeddings_VMD = unit_rows(6)
    found = on_ranks(2, assignments_of_rank, embeddings_VMD)
    model = small_model()
    model.assign(embeddings_VMD)
    expected = model.assign(embeddings_VMD)
    for view in range(2):
        torch.testing.assert_close(torch.cat([assigned[view] for assigned, _ in found]), expected[view])
    assert all(torch.equal(queue, model.queue) for _, queue in found)


def test_loss_equals_the_swapped_prediction() -> None:
    model = small_model(queue_length=0)
    large, small = crops(2, 32), crops(3, 16, seed=2)
    loss = model(large, small)
    embeddings = [*model.embed(large), *model.embed(small)]
    centers = model.prototypes.weight / model.prototypes.weight.norm(dim=1, keepdim=True)
    targets = model.assign(torch.stack(embeddings[:2]))
    terms = []
    for target, view in [(t, v) for t in range(2) for v in range(5) if t != v]:
        for image in range(4):
            scores = embeddings[view][image] @ centers.T / 0.1
            terms.append(-(targets[target][image] * (scores - scores.logsumexp(0))).sum())
    torch.testing.assert_close(loss, torch.stack(terms).mean())


def test_model_learns_patterns_without_labels() -> None:
    """Images of one pattern differ in brightness and noise. After training, the nearest image has the same pattern."""
    generator = torch.Generator().manual_seed(0)
    wave = torch.arange(32.0)
    rows, columns = (wave * 0.8).sin()[:, None].expand(32, 32), (wave * 0.4).cos()[None].expand(32, 32)
    patterns = torch.stack([rows, columns, rows * columns])[:, None].expand(3, 3, 32, 32)
    labels = torch.arange(12) % 3

    def views(num_views: int) -> Tensor:
        shape = (12, num_views, 1, 1, 1)
        scale = 1 + 0.3 * torch.randn(shape, generator=generator)
        noise = 0.3 * torch.randn(12, num_views, 3, 32, 32, generator=generator)
        return scale * patterns[labels][:, None] + noise

    model = small_model(temperature=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(40):
        loss = model(views(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < math.log(6)
    embeddings_BD = model.embed(views(1))[0]
    nearest_B = (embeddings_BD @ embeddings_BD.T - 2 * torch.eye(12)).argmax(dim=1)
    assert (labels[nearest_B] == labels).float().mean() > 0.9
    used = (model.prototypes(embeddings_BD).argmax(dim=1)).unique()
    assert len(used) >= 3


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(RoomierError, match="queue_length"):
        small_model(queue_length=-1)
    with pytest.raises(RoomierError, match="temperature"):
        small_model(temperature=0.0)
    with pytest.raises(RoomierError, match="large_crops"):
        small_model()(crops(3, 32))
