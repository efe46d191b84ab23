"""iGPT: sizes, the order of pixels, colors, and learning."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks.models.igpt import SIZES, ImageGPT
from roomier.core.errors import RoomierError
from roomier.models.gpt import GPTConfig

SMALL = GPTConfig(vocab_size=5, context=16, num_layers=2, num_heads=2, width=16, dropout=0.0)


def quantize(images: Tensor, palette_VC: Tensor) -> Tensor:
    """Return the palette index of the nearest color for each pixel, int64 ``[B, H, W]`` (section 3.2 of the paper).

    Args:
        images: ``[B, C, H, W]``.
        palette_VC: colors, ``[V, C]``. The paper uses the 512 centers of a k-means clustering of all pixels.
    """
    pixels_BHWC = images.movedim(1, -1)
    distances = torch.cdist(pixels_BHWC.flatten(0, 2), palette_VC)
    return distances.argmin(dim=-1).view(pixels_BHWC.shape[:-1])


def small_model() -> ImageGPT:
    torch.manual_seed(0)
    return ImageGPT(SMALL)


def images(num_images: int = 2) -> Tensor:
    return torch.randint(5, (num_images, 4, 4), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "published"), [("igpt-s", 76e6), ("igpt-m", 455e6), ("igpt-l", 1362e6)])
def test_sizes_have_the_published_number_of_parameters(name: str, published: float) -> None:
    """Table 1 of the paper, with images of 32 by 32 pixels and 512 colors."""
    num_layers, num_heads, width = SIZES[name]
    with torch.device("meta"):
        model = ImageGPT(GPTConfig(512, 32 * 32, num_layers, num_heads, width))
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(published, rel=0.01)


def test_a_pixel_changes_only_the_predictions_of_later_pixels() -> None:
    model = small_model()
    logits_BTV, loss = model(images())
    assert logits_BTV.shape == (2, 16, 5)
    assert loss.item() == pytest.approx(math.log(5), abs=0.05)
    changed = images()
    changed[:, 1, 2] = (changed[:, 1, 2] + 1) % 5
    differs_T = (model(changed)[0] != logits_BTV).any(-1).all(0)
    assert differs_T.tolist() == [False] * 7 + [True] * 9


def test_loss_is_the_mean_over_all_pixels() -> None:
    logits_BTV, loss = small_model()(images())
    chosen_BT = logits_BTV.log_softmax(-1).gather(-1, images().flatten(1)[..., None])
    torch.testing.assert_close(loss, -chosen_BT.mean())


def test_pixels_become_the_nearest_color() -> None:
    palette_VC = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 1]])
    pixels = torch.tensor([[0, 3], [2, 1]])
    noisy = palette_VC[pixels].movedim(-1, 0)[None] + 0.1
    assert torch.equal(quantize(noisy, palette_VC), pixels[None])


def test_model_memorizes_images() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        logits_BTV, loss = model(images())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # Except for its first pixel, which is not predictable, each image is known.
    assert loss.item() < 2 * math.log(2) / 16 + 0.05
    assert torch.equal(logits_BTV.argmax(-1)[:, 1:], images().flatten(1)[:, 1:])


def test_an_image_larger_than_the_context_is_rejected() -> None:
    with pytest.raises(RoomierError, match="16 pixels"):
        small_model()(torch.zeros(1, 5, 4, dtype=torch.long))
