"""gradientmail export: the run's model in files that others read without this package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors import safe_open
from torch import nn

from gradientmail_torch import Session, align
from tests.cli.conftest import Command, join, small_model, together, train


class Tied(LightningModule):
    """With what does not travel: a frozen layer and a second name of a weight."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(7, width)
        self.frozen = nn.Linear(width, width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.frozen.requires_grad_(False)


def aligned(url: str) -> dict[str, torch.Tensor]:
    model = small_model()
    align(model, mailbox=url)
    return model.state_dict()


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_the_file_holds_what_align_loads_into_a_model(command: Command, finished_run: str, tmp_path: Path, name: str) -> None:
    said = command("export", finished_run, str(tmp_path / "new" / name)).stdout
    assert "versions 3, 3" in said
    if name.endswith(".pt"):
        found = torch.load(tmp_path / "new" / name, weights_only=True)
    else:
        with safe_open(tmp_path / "new" / name, "pt") as file:
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            assert file.metadata()["versions"] == "[3, 3]"
    expected = aligned(finished_run)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value), key


def test_it_is_read_in_a_fresh_python_without_this_package(command: Command, finished_run: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    command("export", finished_run, str(file))
    program = (
        "import sys; sys.modules['gradientmail_torch'] = None\n"
        "from safetensors.torch import load_file\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))\n"
        f"print(model.load_state_dict(load_file({str(file)!r})))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "All keys matched" in ended.stdout, ended.stderr


def lightning_run(tmp_path: Path) -> tuple[str, Tied]:
    url, model = str(tmp_path / "mailbox"), Tied(width=6)
    with Session(model, mailbox=url, learner_id="node-a", algorithm=together(parties=1), poll_interval=0.02, lease=3) as session:
        train(session, model, 2)
    align(model, mailbox=url)
    return url, model


def test_a_lightning_checkpoint_is_loaded_by_load_from_checkpoint(command: Command, tmp_path: Path) -> None:
    url, model = lightning_run(tmp_path)
    template = tmp_path / "template.ckpt"
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": {"width": 6}, "pytorch-lightning_version": "2.5.0"}, template)
    said = command("export", url, str(tmp_path / "model.ckpt"), "--template", str(template)).stdout
    assert "3 of them from the template" in said
    loaded = Tied.load_from_checkpoint(tmp_path / "model.ckpt", map_location="cpu")
    assert loaded.hparams["width"] == 6
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_the_second_name_of_a_weight_follows_the_one_that_was_trained(command: Command, tmp_path: Path) -> None:
    url, model = lightning_run(tmp_path)
    torch.save(Tied(width=6).state_dict(), tmp_path / "untrained.pt")
    command("export", url, str(tmp_path / "model.pt"), "--template", str(tmp_path / "untrained.pt"))
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(found["head.weight"], model.tokens.weight)


def test_arguments_of_the_model_can_be_given(command: Command, tmp_path: Path) -> None:
    url, model = lightning_run(tmp_path)
    command("export", url, str(tmp_path / "model.ckpt"), "--hparams", '{"width": 6}')
    with pytest.warns(UserWarning, match="not in the checkpoint"):  # the frozen layer
        loaded = Tied.load_from_checkpoint(tmp_path / "model.ckpt", map_location="cpu", strict=False)
    assert torch.equal(loaded.tokens.weight, model.tokens.weight)


def test_parameters_can_be_of_another_type(command: Command, finished_run: str, tmp_path: Path) -> None:
    command("export", finished_run, str(tmp_path / "model.pt"), "--dtype", "bf16")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found["1.weight"].dtype == torch.bfloat16
    assert found["2.running_mean"].dtype == torch.float32
    assert found["2.num_batches_tracked"].dtype == torch.int64


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1 + 2j, 3j]))
        self.out = nn.Linear(2, 1)


@pytest.mark.parametrize("compiled", [False, True])
def test_complex_parameters_come_out_as_such_and_names_are_those_of_the_template(command: Command, tmp_path: Path, compiled: bool) -> None:
    url = str(tmp_path / "mailbox")
    model = Spectral()
    if compiled:
        model.out = torch.compile(model.out)
    with Session(model, mailbox=url, learner_id="a"):
        pass
    torch.save(model.state_dict(), tmp_path / "template.pt")
    command("export", url, str(tmp_path / "plain.pt"))
    command("export", url, str(tmp_path / "like.pt"), "--template", str(tmp_path / "template.pt"))
    assert torch.load(tmp_path / "plain.pt").keys() == Spectral().state_dict().keys()
    for name, fresh in (("plain.pt", Spectral()), ("like.pt", model)):
        fresh.load_state_dict(torch.load(tmp_path / name))
        assert fresh.w.tolist() == [1 + 2j, 3j]


class TestRefusals:
    @pytest.mark.parametrize("dtype", ["floaty", "complex64"])
    def test_a_type_that_is_none(self, command: Command, tmp_path: Path, dtype: str) -> None:
        url = str(tmp_path / "mailbox")
        with Session(nn.Linear(3, 1), mailbox=url, learner_id="a"):
            pass
        manifest = tmp_path / "mailbox" / "run.json"
        manifest.write_text(manifest.read_text().replace("float32", dtype))
        assert f"'weight' is '{dtype}' of shape (1, 3)" in command("export", url, str(tmp_path / "model.pt"), fails=True).output

    def test_what_cannot_be_is_named(self, command: Command, finished_run: str, tmp_path: Path) -> None:
        out = str(tmp_path / "model.pt")
        assert "or give --format" in command("export", finished_run, str(tmp_path / "model"), fails=True).stderr
        assert "--format must be" in command("export", finished_run, out, "--format", "onnx", fails=True).stderr
        assert "dtype must be" in command("export", finished_run, out, "--dtype", "fp8", fails=True).stderr
        assert "is not JSON" in command("export", finished_run, out, "--hparams", "{", fails=True).stderr
        assert "must be a JSON object" in command("export", finished_run, out, "--hparams", "[1]", fails=True).stderr
        assert "no template" in command("export", finished_run, out, "--template", out, fails=True).stderr
        assert "holds no run" in command("export", str(tmp_path), out, fails=True).stderr

    def test_a_template_of_another_model_is_refused(self, command: Command, finished_run: str, tmp_path: Path) -> None:
        torch.save(Tied().state_dict(), tmp_path / "other.pt")
        said = command("export", finished_run, str(tmp_path / "m.pt"), "--template", str(tmp_path / "other.pt"), fails=True).stderr
        assert "of another model" in said

    def test_a_template_of_another_width_is_refused(self, command: Command, finished_run: str, tmp_path: Path) -> None:
        state = small_model().state_dict()
        torch.save({**state, "1.weight": torch.zeros(9, 4)}, tmp_path / "wider.pt")
        said = command("export", finished_run, str(tmp_path / "m.pt"), "--template", str(tmp_path / "wider.pt"), fails=True).stderr
        assert "the template is of another model: '1.weight' has shape (9, 4) there and (5, 4) in the run" in said

    def test_a_template_is_not_unpickled_unless_it_is_trusted(self, command: Command, finished_run: str, tmp_path: Path) -> None:
        torch.save({"state_dict": small_model().state_dict(), "callback": Path("x")}, tmp_path / "t.ckpt")
        asked = ["export", finished_run, str(tmp_path / "m.ckpt"), "--template", str(tmp_path / "t.ckpt")]
        assert "--trust-template" in command(*asked, fails=True).stderr
        command(*asked, "--trust-template")


def test_a_run_that_goes_on_is_exported_as_it_is(command: Command, tmp_path: Path) -> None:
    url = str(tmp_path / "mailbox")
    session, model = join(url, "node-a", together(parties=1))
    with session:
        train(session, model, 2)
        assert "versions 1, 1" in command("export", url, str(tmp_path / "model.pt")).stdout
