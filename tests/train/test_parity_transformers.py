"""Hugging Face models train without a wrapper, and the results equal those of a bare loop."""

import copy

import pytest
import torch

from tests.hugging_face.small import VOCABULARY, small, transformers

pytestmark = pytest.mark.more


def gpt2():
    return small("GPT2LMHeadModel", num_hidden_layers=1, dropout=0.1)


def bert():
    return small("BertForMaskedLM", num_hidden_layers=1, intermediate_size=32, dropout=0.1)


def bert_classifier():
    sizes = {"num_hidden_layers": 1, "intermediate_size": 32, "num_labels": 3}
    return small("BertForSequenceClassification", dropout=0.1, **sizes)


def t5():
    return small("T5ForConditionalGeneration", num_hidden_layers=1, intermediate_size=32, dropout=0.1)


def token_batches(count):
    """Return batches of rows with different numbers of labels."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for index in range(count):
        tokens = torch.randint(VOCABULARY, (2, 8), generator=generator)
        labels = tokens.clone()
        labels[:, : index % 3 * 3] = -100
        batches.append({"input_ids": tokens, "labels": labels})
    return batches


def sequence_batches(count):
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(VOCABULARY, (1 + index % 3, 8), generator=generator),
            "labels": torch.randint(3, (1 + index % 3,), generator=generator),
        }
        for index in range(count)
    ]


CASES = {
    # Function that counts the labels over which a model averages its loss. A causal model drops the first label of each
    # row.
    "gpt2": (gpt2, token_batches, lambda batch: int((batch["labels"][:, 1:] != -100).sum())),
    "bert": (bert, token_batches, lambda batch: int((batch["labels"] != -100).sum())),
    "t5": (t5, token_batches, lambda batch: int((batch["labels"] != -100).sum())),
    "bert classifier": (bert_classifier, sequence_batches, lambda batch: len(batch["labels"])),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_parity_with_a_bare_loop(make_trainer, rows, name, accumulate):
    make_model, make_batches, count = CASES[name]
    torch.manual_seed(0)
    model = make_model().train()
    bare = copy.deepcopy(model)
    batches = make_batches(6 * accumulate)

    # Parameters with two or more dimensions decay, except tables of biases, as in the optimizers of the Plan.
    decays = {name: p.dim() >= 2 and "bias" not in name for name, p in bare.named_parameters()}
    groups = [
        {"params": [p for name, p in bare.named_parameters() if decays[name]], "weight_decay": 0.01},
        {"params": [p for name, p in bare.named_parameters() if not decays[name]], "weight_decay": 0.0},
    ]
    # The exact gradient of attention's key biases is 0. An eps far above the rounding error of a gradient prevents Adam
    # from amplifying the error to steps of the learning rate.
    adamw = {"lr": 1e-3, "eps": 1e-3}
    optimizer = torch.optim.AdamW(groups, **adamw, fused=True)
    torch.manual_seed(1)
    expected = []
    for start in range(0, len(batches), accumulate):
        window = batches[start : start + accumulate]
        total = sum(map(count, window))
        optimizer.zero_grad()
        losses = [bare(**batch).loss * (count(batch) / total) for batch in window]
        sum(losses).backward()
        optimizer.step()
        expected.append(float(sum(losses).detach()))

    torch.manual_seed(1)
    trainer = make_trainer(
        optimizer={"name": "adamw", **adamw},
        max_steps=6,
        accumulate_grad_batches=accumulate,
        logger=rows,
        log_every_n_steps=1,
    )
    trainer.fit(model, batches)

    assert trainer.global_step == 6
    assert rows.column("loss") == pytest.approx(expected, rel=1e-6)
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert "train_loss" in trainer.callback_metrics


def test_loader_of_batch_encodings_and_validation(make_trainer, rows):
    """The validation loss of the epoch is the mean over all labels, not over batches."""
    torch.manual_seed(0)
    model = bert_classifier().eval()
    batches = [transformers.BatchEncoding(batch) for batch in sequence_batches(3)]
    trainer = make_trainer(optimizer="sgd", learning_rate=1e-3, max_epochs=1, logger=rows)
    [metrics] = trainer.validate(model, batches)
    with torch.no_grad():
        weighted = sum(float(model(**batch).loss) * len(batch["labels"]) for batch in batches)
    assert metrics["val_loss"] == pytest.approx(weighted / 6, rel=1e-6)
    assert trainer.predict(model, batches)[0].logits.shape == (1, 3)


def test_model_in_evaluation_mode_stays_in_it_with_a_notice(make_trainer, capsys):
    """``from_pretrained`` returns models in evaluation mode, in which dropout is disabled."""
    trainer = make_trainer(optimizer="sgd", max_steps=1)
    model = bert().train()
    model.bert.embeddings.eval()
    trainer.fit(model, token_batches(1))
    message = "modules are in evaluation mode and stay in this mode, without dropout (the first: bert.embeddings)"
    assert message in capsys.readouterr().err
    assert not model.bert.embeddings.training
    trainer.fit(model.train(), token_batches(1))
    assert "evaluation mode" not in capsys.readouterr().err
