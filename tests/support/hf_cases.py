"""What tests of `ChunkTrainer` share: gradients of whole sequences, what plain `Trainer` is given, and processes."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from chunkplan.errors import ChunkplanError
from chunkplan_runtime import ChunkTrainer, open_plan
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.proof.prove import relative_errors, vanishing_gradients
from chunkplan_runtime.train import read_options
from chunkplan_runtime.training.optimizer import make_optimizer
from tests.support.training_cases import join


class Gradients(TrainerCallback):
    """Keeps the gradients of the first step, and stops."""

    def __init__(self):
        self.found = {}

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        control.should_training_stop = True
        return control


def whole_gradients(model, sequences):
    """Plain training of one step: sequences whole, one after another; loss too."""
    num_targets = sum(int(target.sum()) for _, target in sequences)
    total = 0.0
    for ids, target in sequences:
        ids, target = torch.from_numpy(np.asarray(ids)).long(), torch.from_numpy(np.asarray(target))
        logits = model(ids[None]).logits[0, :-1][target[1:]]
        loss = cross_entropy(logits, ids[1:][target[1:]], reduction="sum") / num_targets
        loss.backward()
        total += loss.item()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients, total


def assert_same_gradients(found, reference):
    assert found.keys() == reference.keys()
    assert max(relative_errors(found, reference, vanishing_gradients(reference)).values()) <= 1e-12


def with_adapters(model, **options):
    torch.manual_seed(2)
    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **options)
    return get_peft_model(model, config, autocast_adapter_dtype=False).to(model.dtype)


class Sequences(Dataset):
    """The sequences of a plan in its order, as a plain Trainer takes them."""

    def __init__(self, plan, analysis):
        tokens = analysis.tokens()
        ids = [
            segment.sequence_id
            for step in plan.iter_steps()
            for chunks in step.chunks.values()
            for chunk in chunks
            for segment in chunk.segments
            if segment.start == 0
        ]
        self.sequences = [tuple(torch.from_numpy(array.copy()) for array in tokens(number)) for number in ids]

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        return self.sequences[index]


def pad(sequences):
    def joined(rows, value):
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    ids = [ids.long() for ids, _ in sequences]
    labels = [torch.where(target, row, -100) for row, (_, target) in zip(ids, sequences, strict=True)]
    return {
        "input_ids": joined(ids, 0),
        "attention_mask": joined([torch.ones_like(row) for row in ids], 0),
        "labels": joined(labels, -100),
    }


def loss_in_float64(outputs, labels, num_items_in_batch):
    """What transformers computes as well, which casts logits to float32 first."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum") / num_items_in_batch


def plain(made, **more):
    """What makes a plain Trainer see the batches of the plan of `made`."""
    plan, analysis = open_plan(made / "plan")
    return {
        "kind": Trainer,
        "train_dataset": Sequences(plan, analysis),
        "data_collator": pad,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 3,
        "num_train_epochs": 1,
        "remove_unused_columns": False,
        **more,
    }


class _On(TrainerCallback):
    """Asks to stop, fails or dies on one process, when a step has ended."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.step:
            return
        control.should_training_stop |= self.what == "stops"
        if self.what == "fails":
            raise ValueError("by a callback")
        if self.what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)


class _LogsStop(TrainerCallback):
    """Asks to stop when something is logged, after the step has decided what follows it."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


def chunk_trainer_here(
    rank: int,
    *,
    port: int,
    size: int,
    plan: Path,
    model: Path,
    settings: dict[str, Any],
    own: dict[str, Any] | None = None,
    adapters: bool = False,
    dtype: torch.dtype = torch.float64,
    like: list[str] | None = None,
    resume: Any = None,
    seeds: list[int] | None = None,
    on: tuple[int, str, int] | None = None,
) -> tuple[Any, str]:
    """Train by a script that torchrun started as one of `size` processes: (what it leaves, stderr) or (error, stderr).

    `like`: the options of a run whose optimizer and rates this one has. `seeds`: of weights that are drawn, of each
    process. `on`: what which process does after which step.
    """
    join(rank, size, port)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
            for parameter in loaded.parameters() if seeds else ():
                parameter.data.normal_(generator=torch.Generator().manual_seed(seeds[rank]))
            loaded = with_adapters(loaded) if adapters else loaded
            args = TrainingArguments(
                report_to=[], **{"use_cpu": True, "learning_rate": 1e-2, "logging_steps": 1, **settings}
            )
            callbacks = {"stops": _On, "fails": _On, "dies": _On}
            made = (
                [] if on is None or on[0] != rank else [_LogsStop()] if on[1] == "logs" else [callbacks[on[1]](*on[1:])]
            )
            more = {**(own or {}), **({} if like is None else {"optimizers": _like(loaded, like)})}
            trainer = ChunkTrainer(loaded, args=args, plan=plan, callbacks=made, **more)
            with evaluate_in_float64(loaded) if dtype == torch.float64 else contextlib.nullcontext():
                trainer.train(resume_from_checkpoint=resume)
                evaluated = trainer.evaluate()["eval_loss"] if trainer.eval_dataset is not None else None
            trainer.save_model(str(Path(args.output_dir) / "final"))
        except (ChunkplanError, ValueError) as error:
            return repr(error) + getattr(error, "hint", ""), said.getvalue()
        except SystemExit as end:
            return end.code, said.getvalue()
    times = ("runtime", "per_second")
    logs = [
        {name: value for name, value in entry.items() if not name.endswith(times)}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]
    return {"logs": logs, "eval_loss": evaluated, "flops": trainer.state.total_flos}, said.getvalue()


def _like(model: Any, arguments: list[str]) -> tuple[Any, Any]:
    """Optimizer and schedule of a run of the trainer's command."""
    config = read_options([*arguments, "--device", "cpu"])
    optimizer = make_optimizer(dict(model.named_parameters()), config)
    for group in optimizer.param_groups:
        group["lr"] = 1.0  # times the rate
    assert config.max_steps is not None
    return optimizer, LambdaLR(optimizer, lambda step: config.learning_rate(step, config.max_steps or 0))
