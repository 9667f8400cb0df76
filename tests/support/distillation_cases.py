"""Distillation from a teacher's most likely tokens, on whole sequences and on several processes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl.experimental.gkd import GKDTrainer

from chunkplan_runtime import Distillation
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.models.model import new_model, read_config
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.proof.prove import relative_errors, vanishing_gradients
from chunkplan_runtime.training.train_step import StepExecutor
from tests.support.distributed_cases import make_stage, open_for_its_stages
from tests.support.step_loss_cases import gradients_of


def _log_softmax(model: Any, tokens: Any) -> Tensor:
    return model(torch.from_numpy(tokens).long()[None]).logits[0].log_softmax(1)


def distil(rank: int, *, plan: Path, config: Path, top: int, share: float) -> tuple[float, float, float]:
    """The loss of the step of `plan` on all processes, that on whole sequences, and the worst error of a gradient.

    With `top` the whole vocabulary the latter is TRL's. `share`: of cross-entropy.
    """
    opened, analysis = open_for_its_stages(plan)
    model, other = (new_model(read_config(config), torch.float64, seed=seed) for seed in (1, 2))
    reader = analysis.tokens()
    with evaluate_in_float64(model.model), evaluate_in_float64(other.model):
        attention = model.config._attn_implementation
        for each in (model, other):
            each.model.set_attn_implementation("eager")

        @cache
        def likely(number: int) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                found = _log_softmax(other.model, reader(number)[0])[:-1].topk(top, 1)
            return found.indices, found.values

        students, teachers, tops, labels = [], [], [], []
        for number in range(analysis.num_sequences):
            tokens, target = reader(number)
            at = torch.from_numpy(target[1:])
            students.append(_log_softmax(model.model, tokens)[:-1][at])
            teachers.append(likely(number)[1][at])
            tops.append(likely(number)[0][at])
            labels.append(torch.from_numpy(tokens[1:]).long()[at])
        student, teacher, ids, label = map(torch.cat, (students, teachers, tops, labels))
        if top == student.shape[1]:
            whole = torch.zeros_like(student).scatter(1, ids, teacher)
            loss = GKDTrainer.generalized_jsd_loss(student[None], whole[None], label[None], beta=0.0)
        else:
            loss = (teacher.exp() * (teacher - student.gather(1, ids))).sum(1).mean()
        loss = (1 - share) * loss - share * student.gather(1, label[:, None]).mean()
        loss.backward()
        reference = gradients_of(model.model)
        model.model.set_attn_implementation(attention)

        def teach(number: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
            found, log_probs = likely(number)
            return found[start - 1 : stop - 1], log_probs[start - 1 : stop - 1]

        stage = make_stage(rank, opened, analysis, model)
        steps = StepExecutor(stage.executor, stage.shards, job := Job(stage.groups.layout, stage.groups))
        ranks, weighed = steps.run_by(stage.work(0), Distillation(teach, share))
        if stage.shards:
            stage.shards.reduce_gradients()
        gradients, _ = stage.finish_gradients(stage.weights)
    assert weighed is None
    value = sum(job.all_gather_object(sum(each.loss for each in ranks)))
    own = {key: reference[key] for key in gradients}
    return value, float(loss), max([0.0, *relative_errors(gradients, own, vanishing_gradients(own)).values()])
