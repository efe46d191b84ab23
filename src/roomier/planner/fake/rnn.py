"""Recurrent layers in a dry run: workspaces of their kernels and packed sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from roomier.core import torch_fake, torch_private
from roomier.planner.fake import known_values

aten = torch.ops.aten
_PAGE_BYTES = 4096
_NUM_GATES = 4  # number of gates of an LSTM, the only layer that uses this kernel


def rnn_answers() -> dict[Any, Callable[[Any, Any, Any], Any]]:
    """Return substitutes for the operations of recurrent layers."""
    return {aten.mkldnn_rnn_layer.default: _mkldnn_layer, aten._pack_padded_sequence.default: _pack}


def rnn_kernels() -> dict[str, Callable[..., Any]]:
    """Return substitutes, by name, for functions that read the sizes of packed sequences in C++."""
    return {"lstm": _lstm, "_pack_padded_sequence": _packed, "_pad_packed_sequence": _pad}


def _mkldnn_layer(func: Any, args: Any, kwargs: Any) -> Any:
    output, *states, _ = func(*args, **kwargs)
    given, is_training = args[0], args[15]
    length, num_sequences = given.shape[:2]  # always in this order, even with batch_first
    num_bytes = 0
    if is_training:
        num_bytes = workspace_bytes(length, num_sequences, given.shape[2], args[10], given.itemsize)
    return (output, *states, given.new_empty(num_bytes, dtype=torch.uint8))


def workspace_bytes(length: int, num_sequences: int, width_in: int, width: int, itemsize: int) -> int:
    """Return the number of bytes that oneDNN saves for backward, for one LSTM layer in one direction.

    The sizes follow ``rnn_utils.cpp`` in oneDNN (``set_conf``, ``set_offsets``, ``get_good_ld``). They include the
    gates, products, hidden states, cell states, and three types of gradients in float32.

    Args:
        length: number of steps in a sequence.
        num_sequences: number of sequences in the batch.
        width_in: number of input features.
        width: number of hidden features.
        itemsize: number of bytes per element.
    """
    widest = max(width_in, width)
    steps, states = length * num_sequences, 2 * (length + 1) * num_sequences
    regions = (
        steps * _padded(_NUM_GATES * width, itemsize) * itemsize,
        steps * _padded(width, itemsize) * itemsize,
        states * _padded(widest, itemsize) * itemsize,
        states * width * itemsize,
        states * _padded(widest, 4) * 4,
        states * _padded(widest, 4) * 4,
        states * width * 4,
    )
    return sum(_rounded_up(each, _PAGE_BYTES) for each in regions)


def _padded(width: int, itemsize: int) -> int:
    """Return the row length padded to full cache lines, but not to a multiple of 256, which would cause cache
    conflicts."""
    line = 64 // itemsize
    width = _rounded_up(width, line)
    return width + line if width % 256 == 0 else width


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _pack(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    """Pack sequences by time step. Unknown lengths are assumed to be the maximum."""
    given, lengths, batch_first = args
    num_sequences, length = given.shape[:2] if batch_first else (given.shape[1], given.shape[0])
    known = known_values.is_known(lengths) or torch_fake.fake_constant(lengths) is not None
    value = known_values.value_of(lengths)
    with torch_private.without_interception():
        real = value if known else torch.full((num_sequences,), length)
        sizes = (real[None, :] > torch.arange(int(real.max()))[:, None]).sum(dim=1)
        total = int(sizes.sum())
    data = given.new_empty((total, *given.shape[2:]))
    batch_sizes = torch.empty(sizes.shape, dtype=torch.int64)
    known_values.set_value(batch_sizes, sizes)
    return data, batch_sizes


def _packed(kernel: Callable[..., Any], given: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = _Packing.apply(given, lengths, batch_first)  # type: ignore[no-untyped-call]
    return made


class _Packing(torch.autograd.Function):
    """Packing of sequences whose backward pass allocates a full gradient of the input, as in torch."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        ctx.shape = given.shape
        data, batch_sizes = aten._pack_padded_sequence(given, lengths, batch_first)
        ctx.mark_non_differentiable(batch_sizes)
        return data, batch_sizes

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return gradients[0].new_zeros(ctx.shape), None, None


def _pad(
    kernel: Callable[..., Any],
    data: Tensor,
    batch_sizes: Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[Tensor, Tensor]:
    sizes = _numbers(batch_sizes)
    length = max(len(sizes), total_length)
    padded = data.new_full((length, sizes[0], *data.shape[1:]), padding_value)
    begin = 0
    for step, size in enumerate(sizes):  # like the C++ code, copies at each change of size and at the end
        if step + 1 == len(sizes) or sizes[step + 1] != size:
            first = next(i for i, each in enumerate(sizes) if each == size)
            num_rows = (step + 1 - first) * size
            rows = data[begin : begin + num_rows].view(step + 1 - first, size, *data.shape[1:])
            padded[first : step + 1, :size] = rows
            begin += num_rows
    with torch_private.without_interception():
        value = (torch.tensor(sizes)[:, None] > torch.arange(sizes[0])).sum(dim=0)
    lengths = torch.empty(sizes[0], dtype=torch.int64)
    known_values.set_value(lengths, value)
    return (padded.transpose(0, 1) if batch_first else padded), lengths


State = tuple[Tensor, Tensor]


def _lstm(kernel: Callable[..., Any], *args: Any) -> Any:
    """Run an LSTM over packed sequences with the same operations as torch's C++ code (``RNN.cpp``: PackedLayer,
    LSTMCell)."""
    if not isinstance(args[1], Tensor):  # padded sequences
        return kernel(*args)
    data, batch_sizes, (hidden, cell), weights, has_biases, num_layers, dropout, is_training, is_bidirectional = args
    sizes = _numbers(batch_sizes)
    if min(sizes) == max(sizes):  # sequences of equal length need no packing
        options = (weights, has_biases, num_layers, dropout, is_training, is_bidirectional, False)
        output, *state = kernel(data.view(len(sizes), sizes[0], -1), (hidden, cell), *options)
        return (output.reshape(len(data), -1), *state)
    num_directions = 2 if is_bidirectional else 1
    num_each = len(weights) // (num_layers * num_directions)
    states: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(num_directions):
            index = layer * num_directions + direction
            own = weights[index * num_each : (index + 1) * num_each]
            output, state = _direction(data, sizes, (hidden[index], cell[index]), own, has_biases, direction == 1)
            outputs.append(output)
            states.append(state)
        data = torch.cat(outputs, dim=1) if is_bidirectional else outputs[0]
        if dropout and is_training and layer + 1 < num_layers:
            data = torch.dropout(data, dropout, True)
    return data, torch.stack([each[0] for each in states]), torch.stack([each[1] for each in states])


def _direction(
    data: Tensor, sizes: Sequence[int], state: State, weights: Sequence[Tensor], has_biases: bool, is_reverse: bool
) -> tuple[Tensor, State]:
    of_input, of_hidden = weights[0], weights[1]
    input_bias, hidden_bias = (weights[2], weights[3]) if has_biases else (None, None)
    projection = weights[-1] if len(weights) in (3, 5) else None
    products = torch.nn.functional.linear(data, of_input, input_bias)
    begins = list(itertools.accumulate(sizes, initial=0))
    steps = range(len(sizes) - 1, -1, -1) if is_reverse else range(len(sizes))
    first = state
    hidden, cell = (each[: sizes[steps[0]]] for each in state)
    outputs, ended = [], []
    for step in steps:
        size, last = sizes[step], hidden.shape[0]
        if size < last:
            ended.append((hidden[size:], cell[size:]))
            hidden, cell = hidden[:size], cell[:size]
        elif size > last:
            hidden = torch.cat((hidden, first[0][last:size]))
            cell = torch.cat((cell, first[1][last:size]))
        hidden, cell = _cell(
            products[begins[step] : begins[step] + size], hidden, cell, of_hidden, hidden_bias, projection
        )
        outputs.append(hidden)
    if is_reverse:
        return torch.cat(outputs[::-1]), (hidden, cell)
    ended.append((hidden, cell))
    hidden, cell = (torch.cat([each[i] for each in ended[::-1]]) for i in range(2))
    return torch.cat(outputs), (hidden, cell)


def _cell(
    product: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, bias: Tensor | None, projection: Tensor | None
) -> State:
    gates = torch.nn.functional.linear(hidden, weight, bias).add_(product)
    let_in, forget, candidate, let_out = gates.unsafe_chunk(_NUM_GATES, 1)
    cell = (forget.sigmoid_() * cell).add_(let_in.sigmoid_() * candidate.tanh_())
    hidden = let_out.sigmoid_() * cell.tanh()
    return (hidden if projection is None else hidden.matmul(projection.t())), cell


def _numbers(batch_sizes: Tensor) -> list[int]:
    value = known_values.value_of(batch_sizes)
    with torch_private.without_interception():
        found: list[int] = value.tolist()
    return found
