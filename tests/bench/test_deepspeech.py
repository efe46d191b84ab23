"""DeepSpeech 2: sizes, padding, both directions, the loss, and learning."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.models.deepspeech import BLANK, DeepSpeech, DeepSpeechConfig

SMALL = DeepSpeechConfig(num_bands=41, num_letters=6, num_layers=2, width=16, channels=3)
NUM_FRAMES = torch.tensor([24, 17, 9])


def transcribe(log_probs_BSA: Tensor, num_steps_B: Tensor) -> list[list[int]]:
    """Return the most likely letter of each step, without repetitions and blanks (greedy decoding).

    Args:
        log_probs_BSA: log probabilities ``[B, S, A]``.
        num_steps_B: number of valid steps of each sequence.
    """
    found = []
    for best_S, num_steps in zip(log_probs_BSA.argmax(dim=-1), num_steps_B.tolist(), strict=True):
        letters = torch.unique_consecutive(best_S[:num_steps]).tolist()
        found.append([letter for letter in letters if letter != BLANK])
    return found


def small_model() -> DeepSpeech:
    torch.manual_seed(0)
    return DeepSpeech(SMALL).eval()


def sounds() -> Tensor:
    return torch.randn(3, 24, 41, generator=torch.Generator().manual_seed(1))


def test_number_of_parameters_of_the_default_model() -> None:
    with torch.device("meta"):
        model = DeepSpeech(DeepSpeechConfig())
    num_bands, H = 41, 1024  # 161 bands, which each convolution halves
    convolutions = 32 * 41 * 11 + 32 * 32 * 21 * 11 + 2 * 2 * 32
    layers = sum(2 * 4 * H * (width_in + H + 2) for width_in in (32 * num_bands, H, H, H, H))
    norms = 2 * H * 5  # norms of four recurrent layers and the output
    assert sum(each.numel() for each in model.parameters()) == convolutions + layers + norms + H * 29


def test_padding_does_not_change_a_sequence() -> None:
    model = small_model()
    together_BSA = model(sounds(), NUM_FRAMES)
    assert together_BSA.shape == (3, 12, 6)
    torch.testing.assert_close(together_BSA.exp().sum(-1), torch.ones(3, 12))
    for sequence, num_frames in enumerate(NUM_FRAMES.tolist()):
        alone_BSA = model(sounds()[sequence : sequence + 1, :num_frames], NUM_FRAMES[sequence : sequence + 1])
        num_steps = (num_frames + 1) // 2
        assert alone_BSA.shape == (1, num_steps, 6)
        torch.testing.assert_close(together_BSA[sequence : sequence + 1, :num_steps], alone_BSA)
    changed = sounds()
    changed[2, 9:] = 100.0
    assert torch.equal(model(changed, NUM_FRAMES), together_BSA)


@pytest.mark.parametrize("frame", [0, 23])
def test_every_step_depends_on_both_ends(frame: int) -> None:
    model, changed = small_model(), sounds()
    changed[0, frame] += 1.0
    differs_S = (model(changed, NUM_FRAMES) != model(sounds(), NUM_FRAMES))[0].any(-1)
    assert differs_S.all()


def test_recurrent_layer_equals_two_loops_over_cells() -> None:
    layer = small_model().layers[0]
    x_ND = torch.randn(7, 3 * 11)
    packed = torch.nn.utils.rnn.pack_sequence([x_ND])
    lstm, total_NH = layer.lstm, torch.zeros(7, 16)
    for suffix, order in (("", range(7)), ("_reverse", range(6, -1, -1))):
        weights = [getattr(lstm, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        h, c = torch.zeros(16), torch.zeros(16)
        for step in order:
            i, f, g, o = (weights[0] @ x_ND[step] + weights[2] + weights[1] @ h + weights[3]).chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            total_NH[step] += h
    torch.testing.assert_close(layer(packed).data, total_NH)


def test_loss_is_the_mean_over_sequences_of_the_loss_per_letter() -> None:
    model = small_model()
    letters, num_letters = torch.tensor([[1, 2, 2, 5], [3, 4, 0, 0], [5, 0, 0, 0]]), torch.tensor([4, 2, 1])
    log_probs_BSA, loss = model(sounds(), NUM_FRAMES, letters, num_letters)
    each = [
        F.ctc_loss(log_probs_BSA[i, :steps], letters[i, :count], torch.tensor(steps), torch.tensor(count))
        for i, (steps, count) in enumerate(zip([12, 9, 5], num_letters.tolist(), strict=True))
    ]
    torch.testing.assert_close(loss, torch.stack(each).mean())


def test_greedy_decoding_removes_repetitions_and_blanks() -> None:
    best = torch.tensor([[1, 1, BLANK, 1, 2, 2, BLANK, 3], [BLANK, 4, 4, 5, 5, 5, 1, 1]])
    assert transcribe(F.one_hot(best, 6).float(), torch.tensor([8, 4])) == [[1, 1, 2, 3], [4, 5]]


@pytest.mark.more
def test_model_learns_to_transcribe() -> None:
    """Each letter is a tone in one band. Sequences have different lengths."""
    torch.manual_seed(0)
    letters = torch.tensor([[1, 2, 3, 4], [4, 4, 2, 0], [5, 1, 0, 0]])
    num_letters = torch.tensor([4, 3, 2])
    num_frames = 8 * num_letters
    spectrogram = torch.zeros(3, 32, 41)
    for i, count in enumerate(num_letters.tolist()):
        for position, letter in enumerate(letters[i, :count].tolist()):
            spectrogram[i, 8 * position : 8 * position + 6, 8 * letter - 8 : 8 * letter] = 1.0
    model = small_model().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        _, loss = model(spectrogram, num_frames, letters, num_letters)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    log_probs_BSA = model(spectrogram, num_frames)
    expected = [row[:count] for row, count in zip(letters.tolist(), num_letters.tolist(), strict=True)]
    assert transcribe(log_probs_BSA, model.num_steps(num_frames)) == expected
