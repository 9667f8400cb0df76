"""Stock trainers on some processes: `torchrun stock_trainer_cases.py FOLDER CASES` writes FOLDER/CASES-RANK.json.

The folder has `plan`, of the rows of `rows.npz` in their order. CASES are `stock` or `axolotl`. Each case says which
rows the micro-batches of its process had, what was logged, and the norms of all weights at the end.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from chunkplan.errors import DataError
from chunkplan_runtime.adapters.transformers import _of_first, with_plan, with_plan_step

#: Micro-batches of a process in a step, and most tokens of one.
MICRO_BATCHES, CAP = 2, 40

SETTINGS = {
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "num_train_epochs": 2,
    "save_steps": 5,
    "save_strategy": "no",
    "gradient_accumulation_steps": MICRO_BATCHES,
    "per_device_train_batch_size": 2,
}


def rows_of(folder: Path) -> Dataset:
    """The rows of the folder; all tokens are targets."""
    return Dataset.from_dict({"input_ids": [ids.tolist() for ids in np.load(folder / "rows.npz").values()]})


def new_model():
    """A tiny Llama, the same every time."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.for_model("llama", **sizes, **heads, max_position_embeddings=128)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def new_tokenizer():
    """A tokenizer, of which a trainer asks the padding token."""
    words = models.WordLevel({str(word): word for word in range(64)}, unk_token="0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0", eos_token="1", unk_token="0")


class Seen:
    """A collator that notes the rows of each batch."""

    def __init__(self, rows, collator):
        self._row_of = {tuple(ids): row for row, ids in enumerate(rows["input_ids"])}
        self._collator, self.batches = collator, []

    def __call__(self, features):
        self.batches.append([self._row_of[tuple(feature["input_ids"])] for feature in features])
        return self._collator(features)


def new_trainer(kind, folder: Path, rows=None, collator=None, **settings):
    """A trainer of `rows`, by default those of the folder, whose collator is a `Seen`."""
    rows = rows_of(folder) if rows is None else rows
    settings = SETTINGS | {"output_dir": str(folder / "out"), "dataloader_drop_last": True} | settings
    if issubclass(kind, SFTTrainer):
        more = {"padding_free": True, "max_length": None, "bf16": False, "activation_checkpointing": False}
        args = SFTConfig(**more | settings)
        trainer = kind(new_model(), args=args, train_dataset=rows, processing_class=new_tokenizer())
        trainer.data_collator = Seen(rows, trainer.data_collator)
        return trainer
    collator = Seen(rows, collator or DataCollatorWithFlattening())
    return kind(new_model(), args=TrainingArguments(**settings), train_dataset=rows, data_collator=collator)


def run(trainer, resume: str | None = None):
    """Train, from a checkpoint if there is one, and say what of."""
    trainer.train(resume_from_checkpoint=resume)
    return {
        "batches": trainer.data_collator.batches,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": [weight.detach().double().norm().item() for weight in trainer.model.parameters()],
    }


def refused_on_first(rank):
    """What only the first process is asked."""
    raise DataError("cannot be", where=f"process {rank}", hint="none")


class UnsentError(Exception):
    """An error that no other process can be sent: it has a function."""

    def __init__(self):
        super().__init__("broken", lambda: None)


def broken_on_first():
    """What fails on the first process otherwise than by a refusal."""
    raise UnsentError


def stock(folder: Path):
    """`Trainer` and `SFTTrainer`."""
    found, saving = {}, {"save_strategy": "steps"}
    for name, make in (("plan", lambda kind: with_plan(kind, folder / "plan")), ("online", online)):
        out = folder / f"saved-{name}"
        found[name] = run(new_trainer(make(Trainer), folder, output_dir=str(out), **saving))
        workers = {"dataloader_num_workers": 1} if name == "online" else {}
        resumed = new_trainer(make(Trainer), folder, **workers)
        found[f"{name} resumed"] = run(resumed, f"{out}/checkpoint-5")
        found[f"{name} sft"] = run(new_trainer(make(SFTTrainer), folder))
    rank = PartialState().process_index
    try:
        _of_first(rank == 0, partial(refused_on_first, rank))
    except DataError as error:
        found["refused"] = str(error)
    try:
        _of_first(rank == 0, broken_on_first)
    except Exception as error:
        found["broken"] = repr(error)
    return found


def online(kind):
    """A trainer class that plans each step."""
    return with_plan_step(kind, cap=CAP)


def axolotl(folder: Path):
    """axolotl's trainer, as its plugins get it, with its collator of packed rows."""
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.core.training_args import AxolotlTrainingArguments
    from axolotl.integrations.base import BasePlugin, PluginManager
    from axolotl.utils.collators.batching import BatchSamplerDataCollatorForSeq2Seq

    class Plugin(BasePlugin):
        def get_trainer_cls(self, cfg):
            return with_plan(AxolotlTrainer, folder / "plan") if cfg == "plan" else online(AxolotlTrainer)

    manager = PluginManager.get_instance()
    manager.plugins["chunkplan"] = Plugin()
    rows = rows_of(folder)
    lists = [[-100, *ids[1:]] for ids in rows["input_ids"]]
    rows = rows.add_column("labels", lists).add_column("position_ids", [[*range(len(ids))] for ids in lists])
    found, tokenizer = {}, new_tokenizer()
    for name in ("plan", "online"):
        args = AxolotlTrainingArguments(
            **SETTINGS,
            output_dir=str(folder / "out"),
            dataloader_drop_last=True,
            sample_packing=True,
            max_seq_length=CAP,
        )
        seen = Seen(rows, BatchSamplerDataCollatorForSeq2Seq(tokenizer))
        how = {"data_collator": seen, "eval_data_collator": seen, "bench_data_collator": None}
        kind = manager.get_trainer_cls(name)
        found[name] = run(kind(model=new_model(), args=args, train_dataset=rows, processing_class=tokenizer, **how))
    return found


if __name__ == "__main__":
    place, cases = Path(sys.argv[1]), sys.argv[2]
    found = {"stock": stock, "axolotl": axolotl}[cases](place)
    (place / f"{cases}-{PartialState().process_index}.json").write_text(json.dumps(found))
