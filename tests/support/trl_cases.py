"""Tiny trainers of TRL, plain or in chunks, and what they learn; `torchrun trl_cases.py FOLDER` on processes."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer import utils

from chunkplan_runtime.adapters.trl import with_chunks
from chunkplan_runtime.models.parts import evaluate_in_float64, whole_of

CHUNK_SIZE = 8

SETTINGS = {
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "seed": 5,
}


def save_model(folder: Path) -> Path:
    """A tiny Qwen2 in float64, from a folder of which reference models are loaded too."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.for_model("qwen2", **sizes, **heads, max_position_embeddings=128, initializer_range=0.3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder)
    return folder


def new_tokenizer():
    """A tokenizer of numbers."""
    words = Tokenizer(models.WordLevel({str(word): word for word in range(64)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "0", "eos_token": "1", "unk_token": "0"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names, padding_side="left")


def words(length: int, first: int) -> str:
    return " ".join(str(2 + (7 * first + place * (3 + first % 5)) % 62) for place in range(length))


PROMPTS = [words(length, place) for place, length in enumerate([3, 11, 6, 9] * 4)]
PAIRS = {
    "prompt": [f"{prompt} " for prompt in PROMPTS],
    "chosen": [words(9 + place % 14, place + 20) for place in range(16)],
    "rejected": [words(17 - place % 9, place + 50) for place in range(16)],
}
LABELLED = {"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"], "label": [place % 3 > 0 for place in range(16)]}


def reward(completion_ids, **_):
    """Small numbers are good."""
    return [sum(ids) / (40.0 * len(ids)) - 0.1 * len(ids) for ids in completion_ids]


def sampled(**more):
    return {"max_completion_length": 7, "num_generations": 4, "temperature": 0.8, **more}


#: By name the trainer, its settings, its rows and what else it is given.
CASES = {
    "dpo": (DPOTrainer, DPOConfig, PAIRS, {"beta": 0.3}),
    "ipo": (DPOTrainer, DPOConfig, PAIRS, {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.2], "ld_alpha": 0.5}),
    "wpo": (DPOTrainer, DPOConfig, PAIRS, {"use_weighting": True}),
    "kto": (KTOTrainer, KTOConfig, LABELLED, {"beta": 0.3}),
    "grpo": (GRPOTrainer, GRPOConfig, {"prompt": PROMPTS}, sampled(beta=0.1, steps_per_generation=4)),
    "gspo": (
        GRPOTrainer,
        GRPOConfig,
        {"prompt": PROMPTS},
        sampled(importance_sampling_level="sequence", num_iterations=2, entropy_coef=0.05),
    ),
    "long": (GRPOTrainer, GRPOConfig, {"prompt": [words(44, place) for place in range(16)]}, sampled()),
    "rloo": (RLOOTrainer, RLOOConfig, {"prompt": PROMPTS}, sampled(beta=0.1)),
}


class PlainLogProbs:
    """In the place of TRL's kernel, which computes in float32 whatever it is given."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, *_):
        logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
        log_probs = logits.log_softmax(1)
        of_label = log_probs.gather(1, labels[:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(1)
        return of_label, entropy, (2 * log_probs).logsumexp(1), logits.mean(1), of_label == log_probs.amax(1)


def new_trainer(case: str, model: Path, output: Path, chunked: dict | None, dtype=torch.float64, **changes):
    """A trainer of a case, in chunks where `chunked` has arguments of `with_chunks`; `given` are further arguments."""
    kind, settings, rows, own = CASES[case.partition(" ")[0]]
    more = {"reward_funcs": reward} if kind in (GRPOTrainer, RLOOTrainer) else {}
    more |= changes.pop("given", {})
    given = SETTINGS | own | changes
    if "lora" in case:
        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    kind = kind if chunked is None else with_chunks(kind, **chunked)
    return kind(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=dtype),
        args=settings(output_dir=str(output), **given),
        train_dataset=Dataset.from_dict(rows),
        processing_class=new_tokenizer(),
        **more,
    )


@contextmanager
def longest_forwards(trainer):
    """Within the block the list grows by the tokens that a layer is given to compute losses of, at a time."""
    found: list[int] = []
    for each in (whole_of(trainer.model), getattr(trainer, "ref_model", None)):
        if each is not None:
            each.model.layers[0].register_forward_pre_hook(
                lambda _, given, how: (
                    found.append(given[0].shape[:2].numel()) if how.get("past_key_values") is None else None
                ),
                with_kwargs=True,
            )
    yield found


def run(trainer, *, exact: bool = True):
    """Train; the losses that are logged, weights at the end, and all that was logged."""
    with ExitStack() as stack:
        if exact:
            stack.enter_context(mock.patch.object(utils, "_ChunkedLogProbFunction", PlainLogProbs))
            for each in (trainer.model, getattr(trainer, "ref_model", None)):
                if each is not None:
                    stack.enter_context(evaluate_in_float64(each))
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    return [entry["loss"] for entry in logged], weights, logged


def main(folder: Path) -> None:
    """Each process trains cases plain, under DDP, and in chunks, and writes what it found."""
    found = {}
    for case, changes in {"dpo": {}, "grpo lora": {"num_generations": 2}}.items():
        for name, chunked in {"plain": None, "chunks": {"chunk_size": CHUNK_SIZE, "k": 2}}.items():
            sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
            trainer = new_trainer(case, folder / "model", folder / "out", chunked, **sizes, **changes)
            losses, weights, _ = run(trainer)
            norms = {name: each.norm().item() for name, each in weights.items()}
            found[f"{case}, {name}"] = {"losses": losses, "norms": norms}
    (folder / f"found-{PartialState().process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
