"""``save_hyperparameters`` and ``load_from_checkpoint``."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import roomier
from roomier.api.hparams import is_plain


class Net(roomier.Module):
    def __init__(self, width, depth=2, *, names=("a", "b"), loss=None):
        super().__init__()
        self.save_hyperparameters(ignore="loss")
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(module, tmp_path, **keywords):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = roomier.Trainer(max_steps=1, default_root_dir=tmp_path, **{**quiet, **keywords})
    trainer.fit(module, [torch.ones(1, 3)])
    return trainer


def saved(module, tmp_path):
    path = tmp_path / "saved"
    fitted(module, tmp_path).save_checkpoint(path)
    return path


def same_bits(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_arguments_are_stored_with_their_defaults():
    net = Net(3, names=("x",))
    assert dict(net.hparams) == {"width": 3, "depth": 2, "names": ("x",)}
    assert net.hparams.width == net.hparams["width"] == 3
    with pytest.raises(AttributeError, match=r"no hyperparameter 'wide', only: width, depth, names"):
        _ = net.hparams.wide


def test_selected_names():
    class Some(roomier.Module):
        def __init__(self, a, b, c):
            super().__init__()
            self.save_hyperparameters("a", "c")

    assert dict(Some(1, 2, 3).hparams) == {"a": 1, "c": 3}


def test_unknown_name_is_rejected():
    class Wrong(roomier.Module):
        def __init__(self, a):
            super().__init__()
            self.save_hyperparameters("b")

    with pytest.raises(roomier.RoomierError, match=r"save_hyperparameters='b'.*Use one of: a"):
        Wrong(1)


def test_arbitrary_keyword_arguments():
    class Any(roomier.Module):
        def __init__(self, a, **rest):
            super().__init__()
            self.save_hyperparameters()

    assert dict(Any(1, b=2, c=3).hparams) == {"a": 1, "b": 2, "c": 3}


def test_subclass_takes_precedence():
    class Twice(Net):
        def __init__(self, width, factor=2):
            super().__init__(width * factor)

    hparams = Twice(3).hparams
    assert (hparams.width, hparams.factor, hparams.depth) == (3, 2, 2)


def test_method_called_by_init_stores_the_arguments_of_init():
    class Base(roomier.Module):
        def __init__(self, a):
            super().__init__()
            self.keep()

        def keep(self):
            self.save_hyperparameters()

    class Derived(Base):
        def __init__(self, a, b=2):
            super().__init__(a)

    assert dict(Derived(1).hparams) == {"a": 1, "b": 2}


def test_fields_of_a_dataclass_are_arguments():
    @dataclasses.dataclass
    class Data(roomier.DataModule):
        folder: str
        batch_size: int = 8

        def __post_init__(self):
            super().__init__()
            self.save_hyperparameters()

    assert dict(Data("here").hparams) == {"folder": "here", "batch_size": 8}


def test_values_must_be_passed_outside_init():
    class Late(roomier.Module):
        def setup(self, stage):
            self.save_hyperparameters({"seen": 1})
            self.save_hyperparameters()

    module = Late()
    with pytest.raises(roomier.RoomierError, match="save_hyperparameters='Late': must be called in __init__"):
        module.setup("fit")
    assert dict(module.hparams) == {"seen": 1}
    with pytest.raises(roomier.RoomierError, match=r"hparams=.*Call self\.save_hyperparameters\(values\)"):
        module.hparams = {"lr": 0.1}


def test_values_that_are_not_saved_are_reported(capsys):
    class Keeps(roomier.Module):
        def __init__(self, net, size):
            super().__init__()
            self.save_hyperparameters()

    module = Keeps(nn.Linear(1, 1), 3)
    assert isinstance(module.hparams.net, nn.Linear)
    assert "hyperparameter 'net' of Keeps is a Linear, so checkpoints do not contain it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, True),
        (None, True),
        ([1, ("a", {"b": 2.0})], True),
        ({1: "a"}, False),
        (torch.zeros(1), False),
        ([nn.Identity()], False),
        ({1, 2}, False),
    ],
    ids=str,
)
def test_is_plain(value, expected):
    assert is_plain(value) is expected


def test_hyperparameters_are_logged(tmp_path):
    fitted(Net(3), tmp_path, logger=True)
    stored = json.loads((tmp_path / "version_0" / "hparams.json").read_text())
    assert stored["width"] == 3
    assert stored["depth"] == 2


def test_load_from_checkpoint(tmp_path):
    net = Net(3, depth=4, names=("x", "y"))
    path = saved(net, tmp_path)
    loaded = Net.load_from_checkpoint(path)
    assert same_bits(net, loaded)
    assert dict(loaded.hparams) == {"width": 3, "depth": 4, "names": ("x", "y")}
    assert not loaded.is_attached


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")], ids=repr)
def test_load_from_checkpoint_to_a_device(tmp_path, device):
    net = Net(3)
    loaded = Net.load_from_checkpoint(saved(net, tmp_path), map_location=device)
    assert same_bits(net, loaded)


def test_load_from_checkpoint_moves_to_the_device(tmp_path):
    assert Net.load_from_checkpoint(saved(Net(3), tmp_path), map_location="meta").device.type == "meta"


@pytest.mark.parametrize("device", ["gpu", {"cuda:0": "cpu"}, "cuda:99"], ids=repr)
def test_unavailable_device_is_rejected(tmp_path, device):
    path = saved(Net(3), tmp_path)
    with pytest.raises(roomier.RoomierError, match=r"map_location=.*is not a device of this machine"):
        Net.load_from_checkpoint(path, map_location=device)


def test_arguments_replace_stored_values(tmp_path):
    path = saved(Net(3, depth=1), tmp_path)
    loss = nn.MSELoss()
    loaded = Net.load_from_checkpoint(path, names=("new",), loss=loss)
    assert loaded.hparams.names == ("new",)


HPARAMS = "width: 3\ndepth: 1\nnames: !!python/tuple\n- x\n- y\n"


@pytest.mark.parametrize("text", [HPARAMS, '{"width": 3, "depth": 1, "names": ["x", "y"]}'], ids=["yaml", "json"])
@pytest.mark.parametrize("form", ["folder", "lightning"])
def test_a_file_replaces_stored_values(tmp_path, form, text):
    net = Net(3, depth=1)
    fitted(net, tmp_path).save_checkpoint(tmp_path / "saved", format=form)
    (tmp_path / "hparams.yaml").write_text(text)
    loaded = Net.load_from_checkpoint(tmp_path / "saved", "meta", tmp_path / "hparams.yaml", weights_only=True)
    assert tuple(loaded.hparams.names) == ("x", "y")
    assert loaded.device.type == "meta"
    again = Net.load_from_checkpoint(tmp_path / "saved", hparams_file=tmp_path / "hparams.yaml", names=("new",))
    assert again.hparams.names == ("new",)
    assert same_bits(net, again)


@pytest.mark.parametrize("text", ["5", "a: [", "a: !!python/object/apply:os.system ['true']", "a: 1\na: 2"])
def test_a_file_without_hyperparameters_is_rejected(tmp_path, text):
    path = saved(Net(3), tmp_path)
    (tmp_path / "hparams.yaml").write_text(text)
    with pytest.raises(roomier.RoomierError, match=r"hparams_file=.*cannot be read"):
        Net.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.yaml")


def test_subclass_that_fixes_arguments_of_its_base_class(tmp_path):
    """The hyperparameters contain the arguments of the base class, which the subclass does not accept."""

    class Deep(Net):
        def __init__(self, width):
            super().__init__(width, depth=5)

    net = Deep(3)
    loaded = Deep.load_from_checkpoint(saved(net, tmp_path))
    assert same_bits(net, loaded)
    assert len(loaded.layers) == 5


def test_missing_argument_is_reported(tmp_path):
    class Needs(Net):
        def __init__(self, width, table):
            super().__init__(width)
            self.hparams.pop("table")

    path = saved(Needs(3, {"a": 1}), tmp_path)
    with pytest.raises(roomier.CheckpointError, match=r"Needs cannot be constructed.*Pass the missing arguments"):
        Needs.load_from_checkpoint(path)
    assert Needs.load_from_checkpoint(path, table={}).hparams.width == 3


def test_unknown_stored_argument_is_an_error(tmp_path):
    path = saved(Net(3), tmp_path)
    with pytest.raises(roomier.CheckpointError, match="widht"):
        Net.load_from_checkpoint(path, widht=3)


def test_weights_that_do_not_match(tmp_path):
    path = saved(Net(3, depth=1), tmp_path)
    with pytest.raises(roomier.CheckpointError, match=r"layers\.1"):
        Net.load_from_checkpoint(path, depth=2)
    loaded = Net.load_from_checkpoint(path, depth=2, strict=False)
    assert torch.equal(loaded.layers[0].weight, Net.load_from_checkpoint(path).layers[0].weight)


def test_weights_of_other_shapes_are_rejected(tmp_path):
    path = saved(Net(3), tmp_path)
    with pytest.raises(roomier.CheckpointError):
        Net.load_from_checkpoint(path, width=4)
    with pytest.raises(roomier.CheckpointError):
        Net.load_from_checkpoint(path, width=4, strict=False)
