"""What a run is told in confidence shows nowhere: not in logs, reprs, errors, checkpoints or the bucket."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradientmail_torch import DecoupledDiLoCo, Session
from gradientmail_torch.errors import CorruptObject, GradientMailError
from gradientmail_torch.lightning import GradientMailStrategy
from gradientmail_torch.mailbox import Mailbox, open_mailbox
from gradientmail_torch.patterns.barrier import Barrier
from gradientmail_torch.testing.s3_server import S3Server

RUN_KEY = "run-key-7f3a9c51e0d84b26"
ALGORITHM = DecoupledDiLoCo(sync_every=2, fragments=1, grace=0.0)


@pytest.fixture(autouse=True)
def run_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIENTMAIL_RUN_KEY", RUN_KEY)


def chain(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield f"{error} {error!r}"
        error = error.__cause__ or error.__context__


def values(thing: object, depth: int = 4) -> Iterator[str]:
    """The reprs of an object and of what it holds."""
    yield repr(thing)
    if depth and hasattr(thing, "__dict__"):
        for value in vars(thing).values():
            if type(value).__module__.startswith("gradientmail_torch"):
                yield from values(value, depth - 1)


def contents(mailbox: Mailbox) -> Iterator[bytes]:
    inner = mailbox
    while hasattr(inner, "inner"):
        inner = inner.inner
    for key in inner.list(""):
        yield key.encode()
        yield inner.get(key) or b""


@pytest.mark.s3
def test_a_session_on_s3_keeps_its_secrets(s3_server: S3Server, s3_url: str, caplog: pytest.LogCaptureFixture) -> None:
    secrets = [RUN_KEY, s3_server.env["AWS_SECRET_ACCESS_KEY"]]
    caplog.set_level(logging.DEBUG)
    model = nn.Linear(4, 4)
    with Session(model, mailbox=s3_url, learner_id="a", algorithm=ALGORITHM, poll_interval=0.05, lease=3.0) as session:
        Barrier(s3_url, "a", poll_interval=0.05).wait("start", parties=1)
        for _ in range(6):
            session.step(samples=1)
        shown = [*values(session), repr(session.stats())]
    mailbox = open_mailbox(s3_url)
    shown += [*values(mailbox), caplog.text]
    for secret in secrets:
        assert not any(secret in text for text in shown)
        assert not any(secret.encode() in content for content in contents(mailbox))


@pytest.mark.s3
def test_errors_keep_secrets(s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-9d1c44")
    with pytest.raises(GradientMailError) as denied:
        open_mailbox(s3_url)
    with pytest.raises(GradientMailError) as parameter:
        open_mailbox("s3://bucket/run?aws_secret_access_key=wrong-9d1c44")
    with pytest.raises(GradientMailError) as password:
        open_mailbox("s3://name:wrong-9d1c44@bucket/run")
    mailbox = open_mailbox(str(tmp_path))
    (tmp_path / "run.json").write_bytes(b"forged")
    with pytest.raises(CorruptObject) as forged:
        mailbox.get("run.json")
    for caught in (denied, parameter, password, forged):
        for text in chain(caught.value):
            assert "wrong-9d1c44" not in text
            assert RUN_KEY not in text


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        return self.layer(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_lightning_writes_no_secret_into_checkpoints_or_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    strategy = GradientMailStrategy(str(tmp_path / "box"), algorithm=ALGORITHM, learner_id="a", poll_interval=0.05, lease=3.0)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=8,
        strategy=strategy,
        logger=False,
        default_root_dir=tmp_path,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(), DataLoader(TensorDataset(torch.randn(32, 2)), batch_size=4))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".ckpt" for path in written)
    assert not [path for path in written if RUN_KEY.encode() in path.read_bytes()]
    assert not any(RUN_KEY in text for text in [caplog.text, *values(strategy)])
    torch.load(tmp_path / "last.ckpt", weights_only=True)  # and nothing in it needs to be trusted
