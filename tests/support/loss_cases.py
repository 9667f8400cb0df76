"""Losses by name, and what TRL's own trainers make of the same log-probabilities, on whole sequences."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.load import load_analysis
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.execution.losses import find_loss
from chunkplan_runtime.feed.scores import ANALYSIS, IDENTITY, Scores
from chunkplan_runtime.models.model import new_model, read_config
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.proof.prove import relative_errors, vanishing_gradients
from chunkplan_runtime.training.train_step import StepExecutor
from tests.support.distributed_cases import make_stage, open_for_its_stages
from tests.support.step_loss_cases import gradients_of, log_probs_of

#: Pairs of answers, or groups of three rollouts, in a step.
LENGTHS = [23, 9, 30, 14, 12, 40]

#: By name: the loss, its options as they are typed, and the columns of the data that it is to take.
CASES = {
    "dpo": ("dpo", ["beta=0.3"], ()),
    "dpo, smoothed": ("dpo", ["beta=0.3", "label_smoothing=0.2"], ()),
    "ipo": ("ipo", ["beta=0.2"], ()),
    "kto": ("kto", ["beta=0.4", "desirable_weight=0.7", "undesirable_weight=1.3"], ()),
    "kto without a reference point": ("kto", ["beta=0.4", "kl=none"], ()),
    "orpo": ("orpo", ["beta=0.25"], ()),
    "simpo": ("simpo", ["beta=1.5", "gamma=0.6"], ()),
    "grpo": ("grpo", ["epsilon=0.1", "epsilon_high=0.3"], ("reward", "old_log_probs")),
    "grpo, on policy": ("grpo", [], ("reward",)),
    "grpo with a reference": ("grpo", ["beta=0.2", "entropy=0.05"], ("reward", "old_log_probs", "reference_log_probs")),
    "grpo, scaled by the step": ("grpo", ["mean=tokens", "scale=batch"], ("reward", "old_log_probs")),
    "dr. grpo": ("grpo", ["mean=constant", "constant=50", "scale=none"], ("reward", "old_log_probs")),
    "grpo, advantages of sequences": ("grpo", [], ("advantage", "old_log_probs")),
    "gspo": ("gspo", ["epsilon=0.02", "epsilon_high=0.03"], ("reward", "old_log_probs")),
    "dapo": ("dapo", [], ("reward", "old_log_probs")),
    "ppo": ("ppo", [], ("advantages", "old_log_probs")),
}


def kind_of(name: str) -> str:
    loss = CASES[name][0]
    return "rollouts" if loss in ("grpo", "gspo", "dapo", "ppo") else "labelled" if loss == "kto" else "preference"


def write_samples(folder: Path, name: str, sequences: list[tuple[Any, Any]]) -> Path:
    """The analysis of a case at `folder`, and beside it the scores of a reference."""
    kind, random = kind_of(name), np.random.default_rng(7)
    more = {"rollouts": ("group", *CASES[name][2]), "labelled": ("label",), "preference": ("group", "label")}[kind]
    folder.mkdir(parents=True, exist_ok=True)
    writer = AnalysisWriter(folder, samples=kind, columns=more)
    scores: dict[str, list[Any]] = {"sequence_id": [], "positions": [], "log_probs": []}
    for record, (ids, target) in enumerate(sequences):
        size = 3 if kind == "rollouts" else 2
        of_tokens = [-random.uniform(2, 7, len(ids)).astype(np.float32) * target for _ in range(3)]
        values = {
            "group": record // size * size,
            "label": record % 2 == 0 if kind == "preference" else bool(record % 3),
            "reward": random.normal(),
            "advantage": random.normal(),
            "advantages": (of_tokens[0] + 4.0 * target).astype(np.float32),
            "old_log_probs": of_tokens[1],
            "reference_log_probs": of_tokens[2],
        }
        writer.add(0, record, np.asarray(ids, np.int32), np.asarray(target, bool), **{key: values[key] for key in more})
        for key, value in zip(scores, (record, np.flatnonzero(target), of_tokens[2][target]), strict=True):
            scores[key].append(value)
    writer.finish(exact=True, sources=[])
    metadata = {IDENTITY: b"plan, weights\n1 -1", ANALYSIS: load_analysis(folder).content_hash.encode()}
    types = {"sequence_id": pa.int64(), "positions": pa.list_(pa.int32()), "log_probs": pa.list_(pa.float32())}
    (folder.parent / "scores").mkdir()
    table = pa.table(scores, schema=pa.schema(types).with_metadata(metadata))
    pq.write_table(table, folder.parent / "scores" / "steps-00000000-00000000.parquet")
    return folder


def by_trl(name: str, model: Any, analysis: Analysis, reference: Scores | None) -> float:
    """The loss that TRL's trainer gives whole sequences, and gradients in `model`."""
    loss, typed, _ = CASES[name]
    options = dict(entry.split("=") for entry in typed)
    reader = analysis.tokens()
    sequences = [reader(number) for number in range(analysis.num_sequences)]
    log_probs, entropies, ids, positions = log_probs_of(model, sequences)
    longest = max(len(tokens) for tokens, _ in sequences)

    def rows(values: Any) -> Tensor:
        """[num_target_tokens] as [num_sequences, longest - 1], 0 at other tokens."""
        values = torch.as_tensor(values).to(log_probs)
        return torch.zeros(len(sequences), longest - 1).to(log_probs).index_put((ids, positions - 1), values)

    def column(key: str) -> Tensor:
        return rows(
            [
                float(reader.column(key, *np.array([[i], [p], [p + 1]]))[0])
                for i, p in zip(ids.tolist(), positions.tolist(), strict=True)
            ]
        )

    data = {key: column(key) for key in analysis.token_columns}
    if reference is not None:
        data["reference_log_probs"] = rows(reference.at_tokens(ids.numpy(), positions.numpy()))
    numbers = {key: getattr(analysis, key) for key in ("label", "reward", "advantage")}
    data |= {key: torch.from_numpy(each) for key, each in numbers.items() if each is not None}
    value = _TRL[loss](rows(log_probs), rows(torch.ones_like(log_probs)), rows(entropies), data, options)
    value.backward()
    return float(value)


def _trainer(**attributes: Any) -> Any:

    def same(value: Any, **_: Any) -> Any:
        return value

    accelerator = SimpleNamespace(
        device="cpu", gather=same, gather_for_metrics=same, reduce=same, num_processes=1, sync_gradients=True
    )
    usual: dict[str, Any] = {"aux_loss_enabled": False, "_total_train_tokens": 0, "_tp_size": 1}
    metrics: Any = defaultdict(lambda: defaultdict(list))
    model = SimpleNamespace(training=True)
    return SimpleNamespace(accelerator=accelerator, model=model, _metrics=metrics, **{**usual, **attributes})


def _batch(mask: Tensor) -> dict[str, Tensor]:
    whole = torch.cat([torch.zeros(len(mask), 1), mask], 1).long()
    return {"input_ids": whole, "attention_mask": whole, "completion_mask": whole}


def _outputs(log_probs: Tensor, entropies: Tensor) -> Any:
    nothing = torch.zeros_like(log_probs)
    return lambda **_: SimpleNamespace(log_probs=log_probs, entropy=entropies, mean_logits=nothing, is_top1=nothing > 0)


def _in_halves(values: Tensor) -> Tensor:
    return torch.cat([values[::2], values[1::2]])


def _dpo(kind: str, log_probs: Tensor, mask: Tensor, entropies: Tensor, data: Any, options: Any) -> Tensor:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.trainer.dpo_trainer import DPOTrainer

    beta, smoothing = float(options["beta"]), float(options.get("label_smoothing", 0))
    log_probs, mask, entropies, reference = map(_in_halves, (log_probs, mask, entropies, data["reference_log_probs"]))
    if smoothing:  # TRL smooths labels in the loss of CPO, which is that of DPO but for the reference
        trainer = _trainer(alpha=0.0, beta=beta, loss_type="sigmoid", label_smoothing=smoothing)
        return CPOTrainer.cpo_loss(trainer, *(log_probs - reference).sum(1).chunk(2))[0].mean()
    trainer = _trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=0.0,
        use_weighting=False,
    )
    chosen, rejected = reference.sum(1).chunk(2)
    inputs = _batch(mask) | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return DPOTrainer._compute_loss(trainer, _outputs(log_probs, entropies), inputs, False)


def _kto(log_probs: Tensor, mask: Tensor, entropies: Tensor, data: Any, options: Any) -> Tensor:
    """With the answers themselves in the place of the answers to other prompts."""
    from trl.trainer.kto_trainer import KTOTrainer

    has_point = options.get("kl") != "none"
    trainer = _trainer(
        _compute_kl_logps=lambda *_: log_probs.sum(1).detach(),
        precompute_ref_logps=True,
        calculate_KL=has_point,
        loss_type="kto" if has_point else "apo_zero_unpaired",
        beta=float(options["beta"]),
        desirable_weight=float(options.get("desirable_weight", 1)),
        undesirable_weight=float(options.get("undesirable_weight", 1)),
    )
    reference = data["reference_log_probs"].sum(1)
    inputs = _batch(mask) | {"label": data["label"], "ref_logps": reference, "ref_KL_logps": reference}
    return KTOTrainer._compute_loss(trainer, _outputs(log_probs, entropies), inputs, False)


def _orpo(log_probs: Tensor, mask: Tensor, entropies: Tensor, data: Any, options: Any) -> Tensor:
    """TRL rounds to float32 here, which is taken out; cross-entropy is of the targets of the chosen answers alone."""
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    means = log_probs.sum(1) / mask.sum(1)
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        losses, *_ = ORPOTrainer.odds_ratio_loss(_trainer(beta=float(options["beta"])), means[::2], means[1::2])
    return -log_probs[::2].sum() / mask[::2].sum() - losses.mean()


def _simpo(log_probs: Tensor, mask: Tensor, entropies: Tensor, data: Any, options: Any) -> Tensor:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    how = {"alpha": 0.0, "loss_type": "simpo", "label_smoothing": 0.0, "simpo_gamma": float(options["gamma"])}
    means = log_probs.sum(1) / mask.sum(1)
    return CPOTrainer.cpo_loss(_trainer(beta=float(options["beta"]), **how), means[::2], means[1::2])[0].mean()


def _policy(kind: str, log_probs: Tensor, mask: Tensor, entropies: Tensor, data: Any, options: Any) -> Tensor:
    from trl.trainer.grpo_trainer import GRPOTrainer

    high = {"dapo": 0.28}.get(kind, 0.2)
    means = {"tokens": "bnpo", "constant": "dr_grpo", "sequences": "grpo"}
    usual = "sequences" if kind in ("grpo", "gspo") else "tokens"
    trainer = _trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, entropies, None),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if kind == "gspo" else "token",
        beta=float(options.get("beta", 0)),
        epsilon_low=float(options.get("epsilon", 0.2)),
        epsilon_high=float(options.get("epsilon_high", high)),
        loss_type="dapo" if kind == "dapo" else means[options.get("mean", usual)],
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=int(options.get("constant", 1)),
        _entropy_bonus_enabled="entropy" in options,
        use_adaptive_entropy=False,
        entropy_coef=float(options.get("entropy", 0)),
    )
    advantages = data.get("advantages", data.get("advantage"))
    inputs = {
        "prompt_ids": mask[:, :0],
        "prompt_mask": mask[:, :0],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": _advantages(data["reward"], options) if advantages is None else advantages,
        "old_per_token_logps": data.get("old_log_probs"),
        "ref_per_token_logps": data.get("reference_log_probs"),
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def _advantages(rewards: Tensor, options: Any) -> Tensor:
    """As `GRPOTrainer._generate_and_score_completions` makes them, of groups of three."""
    from trl.trainer.utils import nanstd

    groups = rewards.view(-1, 3)
    centred = (groups - groups.mean(1, keepdim=True)).flatten()
    # It rounds n / (n - 1) to float32, which is as exact for groups of three as it is not for a step of six.
    spreads = {"group": nanstd(groups, dim=1).repeat_interleave(3), "batch": rewards.std()}
    scale = options.get("scale", "group")
    return centred if scale == "none" else centred / (spreads[scale] + 1e-4)


_TRL = {
    "dpo": partial(_dpo, "sigmoid"),
    "ipo": partial(_dpo, "ipo"),
    "kto": _kto,
    "orpo": _orpo,
    "simpo": _simpo,
    **{kind: partial(_policy, kind) for kind in ("grpo", "gspo", "dapo", "ppo")},
}


def compare_with_trl(rank: int, *, plan: Path, config: Path, name: str) -> tuple[float, float, float]:
    """The loss of the one step of `plan` on all processes, TRL's on one, and the worst error of a gradient here."""
    opened, analysis = open_for_its_stages(plan)
    model = new_model(read_config(config), torch.float64, seed=1)
    scores = None if kind_of(name) == "rollouts" else Scores(analysis.path.parent / "scores")
    with evaluate_in_float64(model.model):
        attention = model.config._attn_implementation
        model.model.set_attn_implementation("eager")
        expected = by_trl(name, model.model, analysis, scores)
        reference = gradients_of(model.model)
        model.model.set_attn_implementation(attention)
        stage = make_stage(rank, opened, analysis, model)
        steps = StepExecutor(stage.executor, stage.shards, Job(stage.groups.layout, stage.groups))
        _, weighed = steps.run_by(stage.work(0), find_loss(*CASES[name][:2]), reference=scores)
        if stage.shards:
            stage.shards.reduce_gradients()
        gradients, _ = stage.finish_gradients(stage.weights)
    own = {key: reference[key] for key in gradients}
    assert weighed is not None
    return weighed.value, expected, max([0.0, *relative_errors(gradients, own, vanishing_gradients(own)).values()])
