"""Numbers beside tokens that a policy sampled: rewards, advantages, log-probabilities, and what groups them.

The names are those of TRL (`old_per_token_logps`, `ref_per_token_logps`, `sampling_per_token_logps`), verl
(`old_log_probs`, `ref_log_prob`, `rollout_log_probs`, `uid`), slime (`rollout_log_probs`, `ref_log_probs`,
`group_index`), OpenRLHF (`base_action_log_probs`) and NeMo-RL (`prev_logprobs`, `reference_policy_logprobs`,
`generation_logprobs`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from chunkplan.arrays import BoolArray, Float32Array, Int32Array
from chunkplan.intake.records import JsonObject, Rollout
from chunkplan.intake.schemas.fields import CHOOSE, ignoring, json_type, refuse_unread, wrong
from chunkplan.planfile.schema import SAMPLE_COLUMNS, TOKEN_COLUMNS

#: Role -> the keys that usually have it. A `score` is a reward, and as those of groups and lengths it is so only where
#: another role, or the user, says that tokens were sampled.
ROLLOUT_ROLES = {
    "advantages": ("advantages", "advantage"),
    "score": ("score",),
    "reward": ("reward", "rewards"),
    "old_log_probs": (
        *("old_log_probs", "old_logprobs", "old_per_token_logps", "rollout_log_probs", "rollout_logprobs"),
        *("sampling_logprobs", "sampling_per_token_logps", "generation_logprobs", "prev_logprobs"),
    ),
    "reference_log_probs": (
        *("reference_log_probs", "reference_logprobs", "ref_log_probs", "ref_log_prob", "ref_logprobs"),
        *("ref_per_token_logps", "reference_policy_logprobs", "base_action_log_probs"),
    ),
    "group": ("group", "group_id", "group_index", "prompt_id", "uid"),
    "response_length": ("response_length", "response_lengths"),
}
_ROLES = {key: role for role, keys in ROLLOUT_ROLES.items() for key in keys}

_ONLY_BESIDE = {"score", "group", "response_length"}

#: Keys that say what is learnt of an answer: beside texts, of which no rollouts are made, they stop the run.
LEARNT = frozenset((*ROLLOUT_ROLES["advantages"], *ROLLOUT_ROLES["reward"]))

#: The most that a logarithm of a probability may be, which is rounded.
_MOST = 1e-3


def rollout_keys(record: JsonObject, columns: Mapping[str, str]) -> dict[str, str]:
    """The keys of `record` that say something of sampled tokens, each with its role; none of ordinary tokens."""
    roles = _ROLES | {key: role for role, key in columns.items() if role in ROLLOUT_ROLES}
    found = {key: roles[key] for key in roles if record.get(key) is not None}
    is_sampled = not _ONLY_BESIDE.issuperset(found.values())
    return {key: "reward" if role == "score" else role for key, role in found.items() if is_sampled}


def numbers_of(record: JsonObject, columns: Mapping[str, str]) -> tuple[str, ...]:
    """The columns of samples that `record` has, in the order of the contract; none of ordinary tokens."""
    found = rollout_keys(record, columns)
    names = {"group"} if found else set()
    for key, role in found.items():
        is_one = role == "advantages" and not isinstance(record[key], (list, np.ndarray))
        names.add("advantage" if is_one else role)
    return tuple(name for name in (*SAMPLE_COLUMNS.names, *TOKEN_COLUMNS.names) if name in names)


def refuse_unrewarded(record: JsonObject, columns: Mapping[str, str]) -> None:
    """Raise RecordError where an answer's group or score is there, and nothing that makes it a rollout."""
    roles = _ROLES | {key: role for role, key in columns.items() if role in ROLLOUT_ROLES}
    for key in record.keys() & roles.keys():
        if record[key] is not None and roles[key] in ("group", "score"):
            way = f"--column reward={key}" if roles[key] == "score" else "give `reward` or `advantages`"
            says = f"the {roles[key]} of an answer, which has neither a reward nor an advantage"
            refuse_unread(key, says=says, ways=f"to train it as a rollout: {way}; ")


def refuse_other_numbers(record: JsonObject, columns: Mapping[str, str], expected: tuple[str, ...]) -> None:
    """Raise RecordError where `record` has another number of advantages than the records before it."""
    found = numbers_of(record, columns)
    if found != expected:
        kinds = "a number", "a list"
        one, other = kinds if "advantage" in found else kinds[::-1]
        wrong(f"its advantages are {one}, and {other} in other records", "put both into files of their own")


def parse_rollout(
    record: JsonObject,
    keys: Mapping[str, str],
    prompt: Int32Array,
    target: BoolArray,
    extent: range,
    num_response: int,
) -> Rollout:
    """Read the numbers under `keys`, key -> role, of tokens behind a `prompt` of which `extent` is no padding.

    Raises RecordError where they are not finite, not as many as tokens or as `num_response`, or say two things; where
    there is neither a reward nor an advantage, or no target.
    """
    if not target.any():
        wrong("nothing of it counts: its mask has no token that was sampled", "leave this record out")
    by_role: dict[str, str] = {}
    for key, role in keys.items():
        if role in by_role and not np.array_equal(record[by_role[role]], record[key]):
            both = by_role[role], key
            wrong(f"`{both[0]}` and `{key}` both have its {role}", f"{CHOOSE}{ignoring(key)}, or {ignoring(both[0])}")
        by_role.setdefault(role, key)
    if "reward" not in by_role and "advantages" not in by_role:
        hint = "give `reward` or `advantages`; without log-probabilities the tokens are read as ordinary ones"
        wrong("a rollout with neither a reward nor an advantage", hint)
    inside = slice(extent.start, extent.stop)
    of_sequence: dict[str, float] = {"group": _group(record, by_role.get("group"), prompt)}
    of_tokens: dict[str, Float32Array] = {}
    for role, key in by_role.items():
        value = record[key]
        if role in TOKEN_COLUMNS.names and isinstance(value, (list, np.ndarray)):
            numbers = _numbers(value, key, target, num_response)
            if role != "advantages" and (at := _first(numbers > _MOST)) is not None:
                wrong(f"`{key}` has {numbers[at]:g} at a target: the logarithm of a probability is at most 0")
            of_tokens[role] = numbers[inside]
        elif role in ("advantages", "reward"):
            if type(value) not in (int, float, bool) or not math.isfinite(value):
                wrong(f"`{key}` is {value if type(value) is float else json_type(value)}, expected a number")
            of_sequence[role.removesuffix("s")] = float(value)
        elif role not in ("group", "response_length"):
            wrong(f"`{key}` is {json_type(value)}, expected a list with a number for each token")
    return Rollout(of_sequence, of_tokens)


def _numbers(values: Any, key: str, target: BoolArray, num_response: int) -> Float32Array:
    """The numbers of all tokens, float32 [n], 0 at those that are no targets, where they may be null."""
    num_missing = len(target) - len(values)
    if num_missing and len(values) != num_response:
        expected = f"{len(target)} tokens" + (f", {num_response} of them sampled" if num_response < len(target) else "")
        wrong(f"`{key}` has {len(values)} entries, and there are {expected}")
    if not (isinstance(values, np.ndarray) or {*map(type, values)} <= {int, float, type(None)}):
        kind = next(value for value in values if type(value) not in (int, float, type(None)))
        wrong(f"`{key}` has {json_type(kind)} in it, expected numbers")
    numbers = np.concatenate([np.zeros(num_missing), np.array(values, np.float64)])
    if (at := _first(~np.isfinite(numbers) & target)) is not None:
        found = "null (as tables also have NaN)" if values[at - num_missing] is None else numbers[at]
        wrong(f"`{key}[{at - num_missing}]` is {found}, expected a finite number")
    if (at := _first(np.isinf(numbers))) is not None:
        wrong(f"`{key}[{at - num_missing}]` is {numbers[at]}, expected a finite number")
    return np.where(target, numbers, 0).astype(np.float32)


def _group(record: JsonObject, key: str | None, prompt: Int32Array) -> int:
    """A hash of 64 bits of the group that `key` names, else of the prompt."""
    if key is None:
        said = prompt.astype("<i4").tobytes()
    else:
        if type(record[key]) not in (int, str):
            wrong(f"`{key}` is {json_type(record[key])}, expected a number or a text that groups rollouts")
        said = json.dumps(record[key]).encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little", signed=True)


def _first(found: BoolArray) -> int | None:
    return int(np.argmax(found)) if found.any() else None
