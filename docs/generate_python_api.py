"""Writes python-api.md: the public names of both packages with signature and first line, from their docstrings.

Run it after a change of one, with the extra `hf` installed: python docs/generate_python_api.py [OUTPUT]
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from textwrap import fill
from types import FunctionType
from typing import Any

from page_writing import WIDTH, code, table, write_page

import chunkplan
import chunkplan_runtime
from chunkplan.options import Options

HEAD = """# The Python API

Five recipes, then signatures of the functions that are also commands, of their options and of what they return. Lengths
are in tokens, times in microseconds (`_us`) or nanoseconds (`_ns`). The first three run in the folder of the repository
and need no GPU and no torch; the last two are [with the runtime](#a-training-loop-of-your-own).

### What a plan would gain

```python
import chunkplan

analysis = chunkplan.analyze(["sample_data"], "out/analysis", tokenizer="sample_data/tokenizer")
options = chunkplan.TuneOptions(shape="Qwen/Qwen2.5-7B", gpus="8xH100", chunk_sizes=(8192, 16384))
tuning = chunkplan.tune(analysis, options)
for way in tuning.baselines:
    print(way.name, way.step_ns / 1e9, way.fits, way.lost)
print("chunkplan", tuning.best.step_ns / 1e9, tuning.gain)
```

### Make a plan

```python
best = chunkplan.build(analysis, "out/best", tuning.best.config, cost=tuning.best.cost)
config = chunkplan.PlanConfig(chunk_size=8192, k=2, global_batch=128)
small = chunkplan.CostModel(shape="sample_data/model", hardware="l4")
plan = chunkplan.build(analysis, "out/plan", config, cost=small)
assert chunkplan.validate(best.path).ok and chunkplan.validate(plan.path).ok
```

### Read a plan

```python
plan = chunkplan.load_plan("out/plan")
for step in plan.iter_steps():
    for rank, chunks in step.chunks.items():
        longest = max(chunk.prefix_tokens + chunk.num_tokens for chunk in chunks)
        print(step.step, rank, len(chunks), longest, step.predicted_us / 1e6)
print(chunkplan.per_step(plan))
for number in chunkplan.diff("out/plan", "out/best").numbers:
    print(number.name, number.before, number.after)
```

`import chunkplan` imports what a name needs when you first use it, and torch never. `make docs` writes this page from
signatures and docstrings (`docs/generate_python_api.py`); `help(NAME)` shows types, the full docstring and an example.
A default of `...` is long, or depends on other fields.
"""

#: Command -> the functions that do what it does.
FUNCTIONS = {
    "analyze": ["chunkplan.analyze", "chunkplan.write_shard"],
    "merge": ["chunkplan.merge"],
    "tune": ["chunkplan.tune"],
    "build": ["chunkplan.build", "chunkplan.build_like", "chunkplan.plan_step", "chunkplan.prewarm"],
    "inspect": [
        *("chunkplan.length_report", "chunkplan.plan_report", "chunkplan.view_chunk"),
        *("chunkplan.view_record", "chunkplan.write_report"),
    ],
    "diff": ["chunkplan.diff"],
    "simulate": [
        *("chunkplan.simulate_plan", "chunkplan.simulate_lengths", "chunkplan.compare_schedules"),
        "chunkplan.write_trace",
    ],
    "validate": ["chunkplan.validate"],
    "parity": ["chunkplan_runtime.parity.parity"],
    "calibrate": ["chunkplan_runtime.calibration.calibrate.calibrate"],
    "export": ["chunkplan.export", "chunkplan.export_order"],
    "train": [
        "chunkplan_runtime.training.processes.train_alone",
        "chunkplan_runtime.training.processes.train_together",
    ],
}

#: Configuration -> the command that has its fields as options.
COMMANDS = {
    "CostModel": "build",
    "IntakeOptions": "analyze",
    "PlanConfig": "build",
    "TuneOptions": "tune",
    "TrainConfig": "train",
    "CalibrationOptions": "calibrate",
}

RESULTS = """## What they give back

`load_analysis` and `analyze` return an `Analysis`, `load_plan` and `build` a `Plan`. [plan-format.md](plan-format.md)
explains the columns. The others are dataclasses; `help(NAME)` names their fields.
"""

#: Classes of what is given back, by module.
GIVEN_BACK = {
    "chunkplan.planfile.analysis": ["Analysis"],
    "chunkplan.planfile.plan": ["Plan", "PlanStep", "Chunk", "Segment", "Action"],
}

#: Characters of a default that are shown.
_LONGEST = 60

ERRORS = """## Errors

All are a `chunkplan.errors.ChunkplanError` with `message`, `where`, `hint` and `exit_code`, and can be pickled.
"""

RUNTIME = """## chunkplan_runtime

Needs the extra `runtime`; `ChunkTrainer` ([integrations.md](integrations.md#chunktrainer)) also needs `hf`.
[runtime.md](runtime.md) explains how a plan is executed.

### A training loop of your own

```python
import torch
from transformers import AutoModelForCausalLM

from chunkplan_runtime import Executor

device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained("path/to/model", dtype=torch.float32).to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
executor = Executor.from_model(model)

for work in executor.stream("chunkplan-out/plan"):
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = executor.step(work)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(work.step.step, loss)
model.save_pretrained("trained")
```

One process does the work of all ranks. A plan of several stages, or in which ranks share sequences, is refused with the
command that builds one like it. `from_model` takes [types](runtime.md#models) that gradients are exact for, also with
LoRA adapters by peft. `step` adds to `.grad` in the dtype of the weights: keep these in float32, under autocast. Dtype,
device, optimizer, learning rates and `model.train()` are yours. `examples/own_loop.py` goes on where it stopped.

### Weights of your own

```python
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan_runtime import Executor

model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("path/to/model"), dtype=torch.float32)
model.load_state_dict(torch.load("weights.pt"))
for name, weight in model.named_parameters():
    weight.requires_grad = ".self_attn." in name
executor = Executor.from_model(model.train())
for work in executor.stream("chunkplan-out/plan"):
    print(work.step.step, executor.step(work))
    trained = {name: weight.grad.norm() for name, weight in model.named_parameters() if weight.grad is not None}
```

Weights may come from anywhere and be frozen in any part, as of a model within your own module. Here gradients of all
steps are added up, as nothing sets them to zero.

### A loss of your own

```python
from transformers import AutoModelForCausalLM

from chunkplan_runtime import Executor


def mean_of_sequences(tokens):
    num_tokens = tokens.sums(tokens.log_probs.new_ones(len(tokens.log_probs)))
    return -(tokens.sums(tokens.log_probs) / num_tokens).mean()


executor = Executor.from_model(AutoModelForCausalLM.from_pretrained("path/to/model").train())
for work in executor.stream("chunkplan-out/plan"):
    print(work.step.step, executor.step(work, mean_of_sequences))
```

A loss is a function of the log-probabilities of all target tokens of a step, and of their entropies, wherever their
chunks run; `TargetTokens` is below. A first forward of all chunks, which keeps no activations, gives them; gradients
are exact for whatever autograd can differentiate. With peft's adapters,
`executor.step(work, loss, with_reference=True)` gives `tokens.reference` too. On many processes, and pipelines:
`chunkplan train --loss examples/own_loss.py:mean_of_sequences`. Names of [losses](training.md#losses-by-name) stand for
functions of `chunkplan_runtime.execution.losses`: `executor.step(work, "dpo", reference=Scores("scores"))`, or
`partial(dpo, beta=0.3)`. A loss may return metrics too, which `executor.metrics` has.

```python
Executor.from_model(model, *, checkpointing="none", kv_offload=False, router_loss=None, seed=0)
```

`checkpointing` is a [level](cost-model.md#activation-checkpointing); `kv_offload` keeps keys and values of split
sequences in host memory; `router_loss` is that [of `ChunkTrainer`](integrations.md#chunktrainer); `seed` is dropout's.
"""

TRAINING = """## Training, parity and calibration

The functions of `python -m chunkplan_runtime.train`, `chunkplan parity` and `chunkplan calibrate`
([training.md](training.md)). `chunkplan.cost.calibrate.write_profile` writes a profile to a file.
"""

#: Functions and classes of these, by module.
TRAINER = {
    "chunkplan_runtime.training.config": ["TrainConfig"],
    "chunkplan_runtime.training.processes": ["train_alone", "train_together"],
    "chunkplan_runtime.parity": ["parity"],
    "chunkplan_runtime.calibration.calibrate": ["CalibrationOptions", "calibrate"],
}


def spans(texts: Iterable[str]) -> str:
    """Format each name as code."""
    return ", ".join(f"`{text}`" for text in texts)


def names(module: Any) -> Iterator[str]:
    """Yield an entry for each public name of `module`: functions first, then classes."""
    public = {name: getattr(module, name) for name in sorted(module.__all__) if not name.startswith("__")}
    for kind in (FunctionType, type):
        for name, thing in public.items():
            if isinstance(thing, kind):
                yield from entry(module.__name__, name, thing)


def entries(places: dict[str, list[str]]) -> Iterator[str]:
    """Yield entries of what lies in modules that users need not import all of."""
    for place, inside in places.items():
        for name in inside:
            yield from entry(place, name, getattr(import_module(place), name))


def entry(module: str, name: str, thing: Any) -> Iterator[str]:
    """Yield a name with its signature, first line, and the members of a class."""
    words = first_line(thing)
    if is_configuration(thing):
        words += f" Its fields are options of `chunkplan {COMMANDS[name]}`."
    lines = [comment(words), signature(f"{module}.{name}", thing)]
    if isinstance(thing, type) and not is_configuration(thing):
        lines += [comment(f".{shown}: {what}", "    ") for shown, what in members(thing)]
    yield "\n".join(lines)


def comment(words: str, indent: str = "") -> str:
    """Wrap `words` into lines of comments."""
    return fill(words, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ", break_on_hyphens=False)


def is_configuration(thing: Any) -> bool:
    """Whether it is a class of options, which the page of the command line explains."""
    return isinstance(thing, type) and issubclass(thing, Options)


def signature(name: str, thing: Any) -> str:
    """Format a signature, names and defaults alone, with what is returned; wrapped where it is long."""
    found = inspect.signature(thing)
    shown: list[str] = []
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        shown.append(assigned(parameter))
    returns = "" if isinstance(thing, type) else f" -> {annotation(found.return_annotation)}"
    line = f"{name}({', '.join(shown)}){returns}"
    if len(line) <= WIDTH:
        return line
    fields = fill(", ".join(shown), WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{name}(\n{fields},\n){returns}"


def assigned(parameter: inspect.Parameter) -> str:
    """Format a parameter as `name=default`."""
    name = stars(parameter) + parameter.name
    return name if parameter.default is parameter.empty else f"{name}={default_of(parameter)}"


def default_of(parameter: inspect.Parameter) -> str:
    """The default of a parameter; dots where it is long, or computed."""
    default = f'"{parameter.default}"' if isinstance(parameter.default, str) else repr(parameter.default)
    return "..." if len(default) > _LONGEST or "<" in default or default == "UNSET" else default


def stars(parameter: inspect.Parameter) -> str:
    """The stars before a parameter that takes all others."""
    return {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")


def annotation(kind: Any) -> str:
    """Format a type as it stands in the source."""
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


def members(kind: type) -> Iterator[tuple[str, str]]:
    """Yield public methods and properties of a class that no base has, in their order, each with its first line."""
    for name, member in vars(kind).items():
        if name.startswith("_") or name == "to_dict" or any(hasattr(base, name) for base in kind.__bases__):
            continue
        if isinstance(member, property):
            yield name, first_line(member)
        elif isinstance(member, FunctionType | classmethod | staticmethod):
            taken = inspect.signature(getattr(kind, name)).parameters.values()
            names = [stars(each) + each.name for each in taken if each.name not in ("self", "cls")]
            yield f"{name}({', '.join(names)})", first_line(member)


def first_line(thing: Any) -> str:
    """The first sentence of a docstring."""
    return re.split(r"(?<=\.)\s", " ".join((inspect.getdoc(thing) or "").split()))[0]


def errors() -> Iterable[tuple[str, str]]:
    """Yield a row for every kind of error with its exit code and its words."""
    from chunkplan.errors import ChunkplanError

    for kind in (ChunkplanError, *ChunkplanError.__subclasses__()):
        yield f"`{kind.__name__}`, {kind.exit_code}", first_line(kind)


if __name__ == "__main__":
    write_page(
        "python-api.md",
        [
            HEAD,
            table(("command", "in Python"), [(f"`{name}`", spans(made)) for name, made in FUNCTIONS.items()]),
            "## chunkplan",
            code("\n\n".join(names(chunkplan)), "text"),
            RESULTS,
            code("\n\n".join(entries(GIVEN_BACK)), "text"),
            ERRORS,
            table(("error, exit code", "what it means"), errors()),
            RUNTIME,
            code("\n\n".join(names(chunkplan_runtime)), "text"),
            TRAINING,
            code("\n\n".join(entries(TRAINER)), "text"),
        ],
    )
