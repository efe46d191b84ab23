"""DeepSpeech 2: convolutions, bidirectional recurrent layers and a CTC loss (Amodei et al. 2015, arXiv 1512.02595).

The suffix of a tensor's name is its shape:

    B  sequences in the batch          C  channels of a convolution
    T  frames in a spectrogram         H  width of a recurrent layer
    F  frequency bands                 A  letters, including the blank
    S  steps after the convolutions    N  steps in all sequences, without padding
    L  letters in a transcript
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

BLANK = 0
"""Index of the blank label of CTC."""
_KERNELS = (41, 21)  # Number of frequency bands that the kernels of the two convolutions cover.


@dataclass(frozen=True)
class DeepSpeechConfig:
    """Configuration of a :class:`DeepSpeech`. The defaults describe the model in the benchmark of Lightning Sharded.

    Attributes:
        num_bands: number of frequency bands in a spectrogram, at least 41. Windows of 20 ms at 16 kHz have 161 bands.
        num_letters: number of outputs; by default 29 (the blank, 26 letters, the apostrophe and the space).
        num_layers: number of recurrent layers.
        width: hidden size of each direction.
        channels: number of channels of both convolutions.
    """

    num_bands: int = 161
    num_letters: int = 29
    num_layers: int = 5
    width: int = 1024
    channels: int = 32


class Convolution(nn.Module):
    """Convolution over frequency and time, BatchNorm and clipped ReLU (section 3.5 of the paper).

    Steps after the end of a sequence are set to zero, so padding does not affect the valid steps of later layers. In
    training mode, the statistics of BatchNorm include the padding.
    """

    def __init__(self, channels_in: int, channels: int, bands: int, stride: tuple[int, int]) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels_in, channels, (bands, 11), stride, (bands // 2, 5), bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x_BCFT: Tensor, num_steps_B: Tensor) -> Tensor:
        """Return the features ``[B, C, F, S]`` of sequences with ``num_steps_B`` steps after this convolution."""
        x_BCFS = F.hardtanh(self.norm(self.convolution(x_BCFT)), 0.0, 20.0)
        return _without_padding(x_BCFS, num_steps_B)


class Recurrent(nn.Module):
    """Bidirectional LSTM over packed sequences. The output is the sum of both directions (section 3.1 of the paper).

    The input is normalized with statistics over all steps of all sequences (section 3.2). The paper uses simple
    recurrent layers and GRUs. This module uses LSTMs, like the benchmark of Lightning Sharded.
    """

    def __init__(self, width_in: int, width: int, has_norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width_in) if has_norm else nn.Identity()
        self.lstm = nn.LSTM(width_in, width, bidirectional=True)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        """Return the packed sequences after this layer, ``[N, H]``."""
        both, _ = self.lstm(_with_data(packed, self.norm(packed.data)))
        forward_NH, backward_NH = both.data.chunk(2, dim=-1)
        return _with_data(packed, forward_NH + backward_NH)


class DeepSpeech(nn.Module):
    """Speech recognition model with a CTC loss. ``layers`` contains the recurrent layers.

    Args:
        config: sizes of the model.

    Example:
        >>> model = DeepSpeech(DeepSpeechConfig(num_layers=2, width=64))
        >>> log_probs, loss = model(spectrogram, num_frames, letters, num_letters)
    """

    def __init__(self, config: DeepSpeechConfig) -> None:
        super().__init__()
        self.config = config
        self.first = Convolution(1, config.channels, _KERNELS[0], (2, 2))
        self.second = Convolution(config.channels, config.channels, _KERNELS[1], (2, 1))
        num_bands = _halved(_halved(config.num_bands))
        widths = [config.channels * num_bands, *[config.width] * config.num_layers]
        self.layers = nn.ModuleList(
            Recurrent(width_in, config.width, has_norm=index > 0) for index, width_in in enumerate(widths[:-1])
        )
        self.norm = nn.BatchNorm1d(config.width)
        self.head = nn.Linear(config.width, config.num_letters, bias=False)

    def forward(
        self, spectrogram: Tensor, num_frames: Tensor, letters: Tensor | None = None, num_letters: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the log probabilities of the letters, ``[B, S, A]``. If ``letters`` is given, also return the CTC
        loss.

        The loss of a sequence is divided by the length of its transcript. The result is the mean over the sequences.

        Args:
            spectrogram: ``[B, T, F]``, padded at the end.
            num_frames: number of valid frames of each sequence, int64 ``[B]``. :meth:`num_steps` computes the number of
                steps of the result.
            letters: transcripts, int64 ``[B, L]``, padded at the end with any letter. No letter is :data:`BLANK`.
            num_letters: number of letters of each transcript, int64 ``[B]``.
        """
        num_steps_B = self.num_steps(num_frames).cpu()  # packed sequences require lengths in host memory
        x_BCFT = _without_padding(spectrogram.transpose(1, 2)[:, None], num_frames.cpu())
        x_BCFS = self.first(x_BCFT, num_steps_B)
        x_BCFS = self.second(x_BCFS, num_steps_B)
        S = x_BCFS.shape[-1]
        packed = pack_padded_sequence(
            x_BCFS.permute(0, 3, 1, 2).flatten(2), num_steps_B, batch_first=True, enforce_sorted=False
        )
        for layer in self.layers:
            packed = layer(packed)
        packed = _with_data(packed, self.head(self.norm(packed.data)))
        logits_BSA, _ = pad_packed_sequence(packed, batch_first=True, total_length=S)
        log_probs_BSA = logits_BSA.log_softmax(dim=-1, dtype=torch.promote_types(logits_BSA.dtype, torch.float32))
        if letters is None or num_letters is None:
            return log_probs_BSA
        log_probs_SBA = log_probs_BSA.transpose(0, 1)
        loss = F.ctc_loss(log_probs_SBA, letters, num_steps_B, num_letters.cpu(), blank=BLANK, zero_infinity=True)
        return log_probs_BSA, loss

    @staticmethod
    def num_steps(num_frames: Tensor) -> Tensor:
        """Return the number of steps after the convolutions, which halve the number of frames and round up."""
        return (num_frames + 1) // 2


def _without_padding(x_BCFS: Tensor, num_steps_B: Tensor) -> Tensor:
    """Return ``x_BCFS`` with zeros after the end of each sequence."""
    is_padding_BS = torch.arange(x_BCFS.shape[-1]) >= num_steps_B[:, None]
    return x_BCFS.masked_fill(is_padding_BS[:, None, None].to(x_BCFS.device), 0.0)


def _halved(size: int) -> int:
    return (size + 1) // 2


def _with_data(packed: PackedSequence, data: Tensor) -> PackedSequence:
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
