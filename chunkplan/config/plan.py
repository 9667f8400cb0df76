"""Configuration of a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

from chunkplan.config.losses import LOSSES
from chunkplan.domains import FLAG, MOST, Domain, one_of, read_tokens, several, tokens, whole
from chunkplan.errors import UsageError
from chunkplan.layers import FAMILIES, StagePlacement, family_of, split_layers
from chunkplan.options import Advanced, Options, option

Split = Literal["full", "even", "cost", "none"]
Balance = Literal["spread", "search"]
LastBatch = Literal["keep", "drop"]
KeepAttention = Literal["auto", "off"]
Part = Literal["train", "eval"]

#: An epoch takes a sequence at most so many times.
MAX_WEIGHT = 1_000_000

#: The names that `chunkplan.schedule.families` and `chunkplan.packing.packing` have rules for.
SCHEDULES = tuple(FAMILIES)
PACKERS = ("auto", "bfd", "mbs", "column-generation", "exact")

#: Values of `--schedule`.
SCHEDULE = replace(one_of(*SCHEDULES), expected=f"algorithm2 (on one stage) or {' or '.join(SCHEDULES[1:])}")

#: Schedules in which ranks that share chunks meet in one order: first that of one stage, then those of pipelines.
ORDERS_OF_GROUPS = tuple(name for name, family in FAMILIES.items() if family.meets)

#: Schedules whose orders of groups are also those of trees.
TREE_SCHEDULES = ("algorithm2", "1f1b", "interleaved")

#: Schedules of several virtual stages.
VIRTUAL = tuple(name for name, family in FAMILIES.items() if family.placement.virtual_stages > 1)

#: Far beyond any cluster; a plan has rows for every rank and stage.
MAX_DP, MAX_PP, MAX_VIRTUAL, MAX_LAYERS = 1 << 16, 1 << 10, 1 << 6, 1 << 16

#: Pairs of tokens and K: of sequences longer than that many tokens, K in place of `k`.
KByLength = tuple[tuple[int, int], ...]


def _is_k_by_length(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
        and all(type(number) is int and 1 <= number <= MOST for pair in value for number in pair)
        and all(before[0] < after[0] for before, after in pairwise(value))
    )


def _load_pairs(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(tuple(pair) if isinstance(pair, (list, tuple)) else pair for pair in value) or None


def read_k(typed: str) -> dict[str, int | KByLength | None]:
    """K of "4", and of "4,128K:2" also the pairs of tokens and K for longer sequences.

    Raises:
        ValueError: it is neither.
    """
    first, *others = typed.split(",")
    pairs = [(read_tokens(tokens), int(k)) for tokens, k in (other.split(":") for other in others)]
    return {"k": int(first), "k_by_length": _load_pairs(pairs)}


def _read_number(typed: str) -> int | float:
    """A whole number where it is written as one."""
    return int(typed) if typed.isdecimal() else float(typed)


def read_share(weight: float | str) -> Fraction | None:
    """The share that "70%" says, 7/10; None of what is no share."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)%", weight) if isinstance(weight, str) else None
    return Fraction(match[1]) / 100 if match and Fraction(match[1]) <= 100 else None


def _read_weights(typed: list[str]) -> dict[str, float | str]:
    """The weight or share of each source, as typed: {"a.jsonl": 2} for ["a.jsonl=2"], {"a": "70%"} for ["a=70%"]."""
    weights: dict[str, float | str] = {}
    for words in typed:
        source, equals, weight = words.rpartition("=")
        if not equals or not source:
            raise ValueError(words)
        if source in weights:
            raise UsageError(f"{source} has two weights", hint="name every source at most once")
        weights[source] = weight if weight.endswith("%") else _read_number(weight)
    return weights


def _is_cp(value: Any) -> bool:
    return value in ("auto", "off") if isinstance(value, str) else type(value) is int and 2 <= value <= MAX_DP


CP = Domain(
    holds=_is_cp,
    expected=f"auto, off, or a whole number from 2 to {MAX_DP:,}",
    read=lambda typed: int(typed) if typed.isdecimal() else typed,
    metavar="auto|off|N",
    completed=("auto", "off"),
    example="auto",
)
K = replace(whole(1, MOST), read=read_k, typed="a number, or also TOKENS:K as in 8,131072:2")
K_BY_LENGTH = Domain(_is_k_by_length, "pairs of tokens and K, both from 1, tokens ascending", load=_load_pairs)
MICRO_BATCHES = Domain(
    holds=lambda value: value == "fewest" if isinstance(value, str) else type(value) is int and 1 <= value <= MOST,
    expected="fewest, or a whole number from 1",
    read=lambda typed: int(typed) if typed.isdecimal() else typed,
    metavar="N|fewest",
    completed=("fewest",),
    example="fewest",
)
HOLDOUT = Domain(
    holds=lambda value: (type(value) is int and value >= 1) or (type(value) is float and 0 < value < 1),
    expected="a share between 0 and 1, or a whole number of sequences from 1",
    read=_read_number,
    metavar="SHARE|N",
    example="0.01",
)
WEIGHTS = Domain(
    holds=lambda value: isinstance(value, Mapping) and all(isinstance(source, str) for source in value),
    expected="weights by source",
    read=_read_weights,
    typed="SOURCE=70% or SOURCE=X",
    metavar="SOURCE=X",
    example="code.jsonl=70%",
    is_repeated=True,
)

_CHUNKS, _DATA, _RANKS, _ORDER = "Chunks", "What a step holds", "Ranks and stages", "Order on a pipeline"


#: Entries that a manifest lacks where they say nothing, and what they are then.
MAY_LACK: dict[str, object] = {
    "cp": "off",
    "stage_layers": None,
    "keep_attention": "off",
    "micro_batches": None,
    "equal_sequences": False,
    "share_prefixes": False,
    "loss": "sft",
}


def _may_share(config: PlanConfig) -> bool:
    """True if ranks may share sequences by default."""
    is_ordered = config.schedule in ORDERS_OF_GROUPS and config.balance == "spread"
    return config.dp > 1 and is_ordered and config.split != "none" and not config.share_prefixes


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Options):
    """Configuration of a plan.

    Example: `chunkplan.PlanConfig(chunk_size=8192, k=4, dp=8)`

    The help of each option is in its field. `k_by_length`: pairs (tokens, K); for sequences of more tokens K stands in
    place of `k`, and of several pairs the last that applies counts. `part`: whether the plan is of what is held out
    ("eval") or of the others ("train"). `mix` names sources by their path; those of a plan are numbers.

    Raises:
        UsageError: a value is out of range, or does not go with the others.
    """

    chunk_size: int = option(tokens(), "Most tokens in a chunk.", group=_CHUNKS)
    k: int = option(
        K,
        "Chunks of a sequence that hold activations; 8,128K:2 is 8, and 2 over 128K tokens.",
        group=_CHUNKS,
        fills=("k", "k_by_length"),
    )
    k_by_length: KByLength | None = option(
        K_BY_LENGTH, "K of longer sequences: pairs of tokens and K.", group=_CHUNKS, default=None, flag=""
    )
    keep_attention: KeepAttention = option(
        one_of("auto", "off", metavar="WHEN"),
        "Keep what attention gave in chunks that are run again, on the GPU or the host: auto (where it fits and pays) "
        "or off.",
        group=Advanced(_CHUNKS),
        default="auto",
    )
    global_batch: int = option(whole(1, MOST), "Sequences a step.", group=_DATA, default=256)
    epochs: int = option(whole(1, MOST), "Passes over the data.", group=_DATA, default=1)
    last_batch: LastBatch = option(
        one_of("keep", "drop"), "A short last batch of an epoch: keep or drop.", group=Advanced(_DATA), default="keep"
    )
    dp: int = option(whole(1, MAX_DP), "Data-parallel ranks.", group=_RANKS, default=1)
    pp: int = option(whole(1, MAX_PP), "Pipeline stages.", group=_RANKS, default=1)
    share_prefixes: bool = option(
        FLAG, "Run tokens that sequences of a step begin with alike once.", group=Advanced(_CHUNKS), default=False
    )
    schedule: str = option(
        SCHEDULE,
        f"Order on a pipeline: {', '.join(SCHEDULES[1:-1])}, or {SCHEDULES[-1]} (slow).",
        group=Advanced(_ORDER),
        depends=lambda config: "algorithm2" if config.pp == 1 else "1f1b" if config.share_prefixes else "auto",
        default_words="auto",
    )
    virtual_stages: int = option(
        whole(1, MAX_VIRTUAL),
        "Virtual stages of each stage, for interleaved; zero-bubble-v has 2.",
        group=Advanced(_ORDER),
        depends=lambda config: 2 if config.schedule in VIRTUAL else 1,
        default_words="2",
    )
    stage_layers: tuple[int, ...] | None = option(
        several(whole(1, MAX_LAYERS), example="4,4,4,2"),
        "Layers of each stage, first to last; with virtual stages, of each model stage.",
        group=Advanced(_ORDER),
        default=None,
        default_words="as even as possible",
    )
    memory_tokens: int | None = option(
        tokens(1, 2**62 - 1),
        "Most tokens whose activations a stage may hold.",
        group=Advanced(_ORDER),
        called="max-activation-tokens",
        default=None,
        default_words="no bound",
    )
    seed: int = option(whole(0, MOST), "Seed of the shuffle.", group=Advanced(_DATA), default=0)
    split: Split = option(
        one_of("full", "even", "cost", "none", metavar="HOW"),
        "Cut a long sequence at ChunkSize (full), into parts of equal length (even), or of equal predicted time "
        "(cost), or refuse it (none).",
        group=Advanced(_CHUNKS),
        depends=lambda config: "full" if config.micro_batches is None else "none",
        default_words="full, or none with --micro-batches",
        also={"--no-split": "none"},
    )
    tail_sharing: bool = option(
        FLAG,
        "Fill the free room in the chunks of split sequences with short ones.",
        group=Advanced(_CHUNKS),
        called="fill-tails",
        depends=lambda config: config.pp == 1 and not config.share_prefixes,
        default_words="on one stage",
    )
    packing: str = option(
        one_of(*PACKERS),
        "Packer for ranks where best-fit decreasing is not proved optimal: auto, bfd (keep its packing), mbs, "
        "column-generation or exact.",
        group=Advanced(_CHUNKS),
        default="auto",
    )
    balance: Balance = option(
        one_of("spread", "search", metavar="HOW"),
        "How sequences get to ranks: spread, or search (also refined with CP-SAT, slow).",
        group=Advanced(_RANKS),
        default="spread",
    )
    equal_chunks: bool = option(
        FLAG,
        "Give every rank the same number of chunks, which some trainers need for ZeRO-3.",
        group=Advanced(_RANKS),
        default=False,
    )
    micro_batches: int | str | None = option(
        MICRO_BATCHES,
        "Chunks of whole sequences that every rank has in a step, none empty: as many, or as few as possible (fewest).",
        group=Advanced(_RANKS),
        default=None,
    )
    equal_sequences: bool = option(
        FLAG,
        "With --micro-batches, also give every rank the same number of sequences.",
        group=Advanced(_RANKS),
        default=False,
    )
    cp: str | int = option(
        CP,
        "How many ranks may share a sequence: auto (as many as pay), N (at most N), or off.",
        group=Advanced(_RANKS),
        depends=lambda config: "auto" if _may_share(config) else "off",
        default_words="auto where ranks and schedule allow it",
    )
    holdout: int | float | None = option(
        HOLDOUT,
        "Evaluate on a share (0.01) or a number of sequences, in a plan of their own.",
        group=_DATA,
        default=None,
    )
    loss: str = option(
        one_of(*LOSSES, metavar="NAME"),
        f"The loss that time is predicted for: {', '.join(LOSSES)}.",
        group=Advanced(_DATA),
        default="sft",
        default_words="sft; of pairs dpo, of labelled answers kto, of rollouts grpo",
    )
    part: Part = option(one_of("train", "eval"), "Of which sequences it is.", group=_DATA, default="train", flag="")
    mix: Mapping[str, float | str] | None = option(
        WEIGHTS,
        "Share of an epoch's sequences that a file, folder or pattern has (70%), or how often an epoch takes it (2, "
        "0.5). Repeatable.",
        group=_DATA,
        default=None,
    )

    def check_together(self) -> None:
        """Refuse a schedule that is not for this number of stages, and options that would have no effect."""
        if (self.schedule == "algorithm2") != (self.pp == 1):
            raise UsageError(
                f"schedule {self.schedule} is for {'one stage' if self.pp > 1 else 'two stages or more'}, "
                f"pp is {self.pp}",
                hint="leave schedule out, or set pp",
            )
        if FAMILIES[self.schedule].placement.turns and self.virtual_stages != 2:
            raise UsageError(
                f"schedule {self.schedule} has two virtual stages, virtual-stages is {self.virtual_stages}",
                hint="leave virtual-stages out, or use schedule interleaved",
            )
        if self.virtual_stages != 1 and self.schedule not in VIRTUAL:
            raise UsageError(
                f"schedule {self.schedule} has one virtual stage, virtual-stages is {self.virtual_stages}",
                hint="virtual stages are for schedule interleaved",
            )
        if self.virtual_stages == 1 and self.schedule == "interleaved":
            raise UsageError(
                "schedule interleaved has two virtual stages or more, virtual-stages is 1",
                hint="use schedule 1f1b, which has one, or leave virtual-stages out",
            )
        if self.memory_tokens is not None and self.memory_tokens < self.chunk_size:
            raise UsageError(
                f"max-activation-tokens is {self.memory_tokens:,}: below one chunk of {self.chunk_size:,}",
                hint="a stage holds one chunk at least: raise max-activation-tokens or lower chunk-size",
            )
        num_model_stages = self.pp * self.virtual_stages
        if self.stage_layers is not None and len(self.stage_layers) != num_model_stages:
            raise UsageError(
                f"stage-layers is {','.join(map(str, self.stage_layers))}, expected one number for each model stage, "
                f"of which there are {num_model_stages}",
                hint="give as many, or leave it out",
            )
        self._check_prefixes()
        self._check_groups()
        self._check_micro_batches()
        for source, weight in (self.mix or {}).items():
            is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 <= weight <= MAX_WEIGHT
            if not is_number and read_share(weight) is None:
                raise UsageError(
                    f"the weight of {source} is {weight!r}, expected a share such as 70%, or a number from 0 to "
                    f"{MAX_WEIGHT:,}",
                    hint="70% is a share of the sequences of an epoch; 2 takes every sequence of it twice an epoch, "
                    "0.5 every other, 0 none",
                )

    def _check_prefixes(self) -> None:
        """Refuse what has no order for trees, or cuts nothing where a tree is cut. `auto` is 1f1b."""
        if not self.share_prefixes:
            return
        if self.schedule == "auto":
            object.__setattr__(self, "schedule", "1f1b")
        if self.schedule not in TREE_SCHEDULES:
            raise UsageError(
                f"share-prefixes has no order of schedule {self.schedule}",
                hint=f"use schedule {', '.join(TREE_SCHEDULES[1:])}, or leave share-prefixes out",
            )
        others = {
            "cp": self.cp != "off",
            "fill-tails": self.tail_sharing,
            "split none": self.split == "none" and self.micro_batches is None,
            "micro-batches": self.micro_batches is not None,
        }
        for name in (name for name, is_given in others.items() if is_given):
            raise UsageError(
                f"share-prefixes does not go with {name}", hint=f"leave {name.split()[0]} or share-prefixes out"
            )

    def _check_micro_batches(self) -> None:
        """Refuse what has no effect on whole sequences in as many micro-batches on every rank."""
        if self.micro_batches is None:
            if self.equal_sequences:
                raise UsageError(
                    "equal-sequences goes with micro-batches, of which there is no number",
                    hint="add --micro-batches fewest, or leave equal-sequences out",
                )
            return
        if self.split != "none":
            raise UsageError(
                f"micro-batches are of whole sequences, and split is {self.split}", hint="leave split out, or use none"
            )
        others = {
            "equal-chunks": self.equal_chunks,
            "balance": self.balance != "spread",
            "packing": self.packing != "auto",
        }
        for name in (name for name, is_given in others.items() if is_given):
            raise UsageError(f"{name} has no effect beside micro-batches", hint=f"leave {name} out")

    def _check_groups(self) -> None:
        """Refuse context-parallel groups that the ranks cannot be divided into, or that an order is not made for."""
        if self.cp == "off":
            return
        if isinstance(self.cp, int) and self.dp % self.cp:
            sizes = [size for size in range(2, self.dp + 1) if self.dp % size == 0]
            fewer, more = ([size for size in sizes if (size > self.cp) == is_more] for is_more in (False, True))
            nearest = ", ".join(map(str, [*fewer[-1:], *more[:1]]))
            raise UsageError(
                f"cp is {self.cp}, expected a divisor of dp, which is {self.dp}",
                hint=f"choose {nearest} or auto" if nearest else f"set dp to a multiple of {self.cp}, or leave cp out",
            )
        if self.schedule not in ORDERS_OF_GROUPS:
            raise UsageError(
                f"schedule {self.schedule} orders every rank by itself: groups of ranks would deadlock",
                hint="use schedule auto with cp, or leave cp out",
            )
        if self.dp == 1:
            object.__setattr__(self, "cp", "off")  # nobody to share with
        elif self.split == "none":
            raise UsageError(
                "nothing may be split, and cp splits sequences among ranks", hint="leave no-split out, or leave cp out"
            )
        if self.balance == "search":
            raise UsageError(
                "balance search assigns whole sequences to ranks, and cp has ranks share sequences",
                hint="leave balance out, or leave cp out",
            )

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        """The numbers of ranks that may share a sequence, ascending from 1: each is the one before times a prime,
        smallest first.

        Every size divides the next one, so that aligned blocks of ranks are nested.
        """
        sizes = [1]
        most = {"off": 1, "auto": self.dp}[self.cp] if isinstance(self.cp, str) else self.cp
        while sizes[-1] < most:
            left = most // sizes[-1]
            sizes.append(sizes[-1] * next(prime for prime in range(2, left + 1) if left % prime == 0))
        return tuple(sizes)

    def entries(self) -> dict[str, object]:
        """The configuration as manifests and hashes have it: without entries of `MAY_LACK` that say nothing."""
        return {name: value for name, value in asdict(self).items() if name not in MAY_LACK or value != MAY_LACK[name]}

    @classmethod
    def from_entries(cls, entries: dict[str, Any]) -> PlanConfig:
        """Read a configuration from `entries`, as `Options.from_entries` does; entries of older plans may lack."""
        return super().from_entries(MAY_LACK | entries)

    @property
    def placement(self) -> StagePlacement:
        """The placement of model stages on pipeline stages."""
        return family_of(self.schedule).placement._replace(virtual_stages=self.virtual_stages)

    @property
    def splits_backwards(self) -> bool:
        """True if backwards are split into two halves."""
        return family_of(self.schedule).splits

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers of each model stage: those of `stage_layers`, or as even as they come."""
        return self.stage_layers or split_layers(num_layers, self.pp * self.virtual_stages)

    def check_layers(self, num_layers: int, name: str) -> None:
        """Raise UsageError where the stages do not have the layers of the model `name`, or one has none."""
        if self.stage_layers is not None and sum(self.stage_layers) != num_layers:
            raise UsageError(
                f"stage-layers has {sum(self.stage_layers)} layers, {name} has {num_layers}",
                hint=f"give {len(self.stage_layers)} numbers that sum to {num_layers}, or leave it out; --model "
                "names the model",
            )
        if self.pp * self.virtual_stages > num_layers:
            stages, lower = f"{self.pp} stages", "pp"
            if self.virtual_stages > 1:
                stages += f" of {self.virtual_stages} virtual stages"
                lower += " or virtual-stages" if self.schedule == "interleaved" else ", or choose another schedule"
            raise UsageError(
                f"{name} has {num_layers} layers, too few for {stages}", hint=f"lower {lower}; --model names the model"
            )
