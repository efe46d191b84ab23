"""Over 50 steps, the losses and weights of the Trainer equal those of a bare PyTorch loop, up to 1e-6 relative."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roomier
from tests.covering import few

NUM_STEPS = 50
VOCABULARY = 17
TOLERANCE = 1e-6


class Tagger(roomier.Module):
    """Module with a label for each token. The loss is the mean over the labels that are not -100."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(VOCABULARY, 12), nn.Linear(12, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, VOCABULARY)
        )

    def forward(self, tokens):
        return self.net(tokens)

    def training_step(self, batch, batch_idx):
        logits = self(batch["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class TrainedTagger(Tagger):
    """Module with the optimizer and the schedule of the bare loop."""

    def configure_optimizers(self):
        optimizer, scheduler = optimizer_and_scheduler(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def optimizer_and_scheduler(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=NUM_STEPS + 1)


def ragged_batches(count, seed=0):
    """Return batches of different sizes and lengths in which most labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        size, length = (int(torch.randint(1, 7, (), generator=generator)) for _ in range(2))
        tokens = torch.randint(VOCABULARY, (size, length + 1), generator=generator)
        ignored = torch.rand(size, length + 1, generator=generator) < torch.rand((), generator=generator)
        ignored[0, 0] = False  # at least one label
        batches.append({"tokens": tokens, "labels": ((tokens * 5 + 1) % VOCABULARY).masked_fill(ignored, -100)})
    return batches


def bare_loop(module, batches, accumulate, clip):
    """Train with one loss per step: the sum over all its tokens divided by their number, not a mean of means."""
    module.train()
    optimizer, scheduler = optimizer_and_scheduler(module)
    losses = []
    for start in range(0, len(batches), accumulate):
        window = batches[start : start + accumulate]
        num_tokens = sum(int((batch["labels"] != -100).sum()) for batch in window)
        optimizer.zero_grad()
        total = torch.zeros(())
        for batch in window:
            logits = module(batch["tokens"]).flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / num_tokens
            loss.backward()
            total += loss.detach()
        if clip.get("gradient_clip_algorithm") == "value":
            nn.utils.clip_grad_value_(module.parameters(), clip["gradient_clip_val"])
        elif clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip["gradient_clip_val"])
        optimizer.step()
        scheduler.step()
        losses.append(float(total))
    return losses


def largest_distance(module, other):
    """Return the largest difference of a parameter, relative to its norm."""
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    return max(float(((a - b).norm() / b.norm()).detach()) for a, b in pairs)


@pytest.mark.parametrize("dropout", few([0.0, 0.3]))
@pytest.mark.parametrize(
    "clip",
    [
        {},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=["no clip", "norm", "value"],
)
@pytest.mark.parametrize("accumulate", few([3, 1]))
def test_losses_and_weights_of_fifty_steps(make_trainer, rows, accumulate, clip, dropout):
    torch.manual_seed(1)
    module = TrainedTagger(dropout)
    bare = copy.deepcopy(module)
    batches = ragged_batches(NUM_STEPS * accumulate)

    torch.manual_seed(2)
    expected = bare_loop(bare, batches, accumulate, clip)
    torch.manual_seed(2)
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=accumulate, logger=rows, log_every_n_steps=1, **clip)
    trainer.fit(module, batches)

    assert trainer.global_step == NUM_STEPS
    assert rows.column("loss") == pytest.approx(expected, rel=TOLERANCE)
    assert largest_distance(module, bare) < TOLERANCE
    assert expected[-1] < expected[0]


def test_weights_without_accumulation_are_bit_identical(make_trainer):
    torch.manual_seed(1)
    module = TrainedTagger(dropout=0.3)
    bare = copy.deepcopy(module).train()
    batches = ragged_batches(NUM_STEPS)

    torch.manual_seed(2)
    optimizer, scheduler = optimizer_and_scheduler(bare)
    for batch in batches:
        optimizer.zero_grad()
        bare.training_step(batch, 0).backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
    torch.manual_seed(2)
    make_trainer(max_epochs=1, gradient_clip_val=0.05).fit(module, batches)

    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), bare.parameters(), strict=True))


def test_tolerance_distinguishes_a_mean_of_means_from_the_mean(make_trainer):
    """With equal weights of micro-batches, as in other libraries, the parity test above would fail clearly."""

    class MeanOfMeans(TrainedTagger):
        def num_loss_terms(self, batch):
            return 1

    torch.manual_seed(1)
    module = MeanOfMeans()
    bare = copy.deepcopy(module)
    batches = ragged_batches(NUM_STEPS * 3)
    bare_loop(bare, batches, 3, {})
    make_trainer(max_epochs=1, accumulate_grad_batches=3).fit(module, batches)
    assert largest_distance(module, bare) > 1000 * TOLERANCE


def test_last_step_of_an_epoch_may_be_smaller(make_trainer, rows):
    """Seven micro-batches in windows of three: the last step has one micro-batch, so its loss is the mean of this
    micro-batch."""
    torch.manual_seed(1)
    module = TrainedTagger()
    bare = copy.deepcopy(module)
    batches = ragged_batches(7)
    expected = bare_loop(bare, batches, 3, {})
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=3, logger=rows, log_every_n_steps=1)
    trainer.fit(module, batches)
    assert trainer.global_step == 3
    assert rows.column("loss") == pytest.approx(expected, rel=TOLERANCE)
    assert largest_distance(module, bare) < TOLERANCE
