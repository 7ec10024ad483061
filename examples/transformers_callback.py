"""A Hugging Face ``transformers.Trainer`` as a node of a run, by a callback.

    pip install transformers accelerate
    python examples/transformers_callback.py --mailbox s3://bucket/run-1 --rank 0 --nodes 2    # on each machine
    python examples/transformers_callback.py                                                   # or both nodes here

One process a node. transformers is no dependency of this package, so it is imported where it is used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from several import start_nodes

from gradientmail_torch import DecoupledDiLoCo, Session, align
from gradientmail_torch.algorithms import Algorithm
from gradientmail_torch.patterns.barrier import Barrier


def gradientmail_callback(mailbox: str, learner_id: str, *, algorithm: Algorithm | None = None, nodes: int | None = None) -> Any:
    """A TrainerCallback that joins the run before the first step and ends with the run's parameters in the model.

    ``nodes``: how many to wait for, at the start and at the end; none are waited for when left out.
    """
    from transformers import TrainerCallback

    class GradientMail(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            self._samples = args.train_batch_size * args.gradient_accumulation_steps
            self._session = Session(model, mailbox=mailbox, learner_id=learner_id, algorithm=algorithm)
            if nodes is not None:
                Barrier(mailbox, learner_id).wait("start", parties=nodes)
            self._session.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._session.step(samples=self._samples)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs is not None:
                stats = self._session.stats()
                logs["gradientmail/round"] = max(stats.versions, default=0)
                logs["gradientmail/learners"] = stats.learners

        def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            self._session.close()
            if nodes is not None:
                Barrier(mailbox, learner_id).wait("done", parties=nodes, timeout=600)
            align(model, mailbox=mailbox)

    return GradientMail()


def train(rank: int, nodes: int, mailbox: str) -> None:
    """A small GPT-2 from scratch on a made-up language, since nothing is downloaded here."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
    texts = (torch.randint(32, (512, 1)) + 3 * torch.arange(16)) % 32  # other ones on each node
    arguments = TrainingArguments(
        output_dir="out/transformers", max_steps=60, per_device_train_batch_size=8, report_to=[], save_strategy="no",
        learning_rate=3e-3, logging_steps=20, disable_tqdm=True, seed=rank, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        callbacks=[gradientmail_callback(mailbox, f"node-{rank}", algorithm=DecoupledDiLoCo(sync_every=10), nodes=nodes)],
    )
    trainer.train()
    model.eval()
    texts = (torch.arange(32).unsqueeze(1) + 3 * torch.arange(16)) % 32
    with torch.no_grad():
        print(f"node-{rank}: loss of the run {model(input_ids=texts, labels=texts).loss.item()!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mailbox", default="out/transformers_callback", help="URL of the run's mailbox, or a directory")
    parser.add_argument("--rank", type=int, help="which node this is; without it all nodes are started here")
    parser.add_argument("--nodes", type=int, default=2)
    options = parser.parse_args()
    if options.rank is None:
        sys.exit(start_nodes(Path(__file__), options.nodes, options.mailbox))
    train(options.rank, options.nodes, options.mailbox)


if __name__ == "__main__":
    main()
