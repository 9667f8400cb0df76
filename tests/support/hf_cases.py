"""What tests of `ChunkTrainer` share: a plan, gradients of whole sequences, and what plain `Trainer` is given."""

from __future__ import annotations

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback

from chunkplan_runtime import open_plan
from chunkplan_runtime.proof.prove import relative_errors, vanishing_gradients


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
