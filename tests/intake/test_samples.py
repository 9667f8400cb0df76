"""Preference pairs, labelled answers and rollouts: shapes of data -> sequences, groups, labels, numbers; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from chunkplan import IntakeOptions, analyze, load_analysis, validate
from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan.exporting.export import open_rows, open_source
from chunkplan.intake.reading import IntakeRequest
from chunkplan.intake.schemas.pairs import split_pair
from chunkplan.intake.shard import merge, write_shard
from chunkplan.planfile.analysis import Analysis
from chunkplan.reporting.record_view import view_record
from tests.support.command_line import Run
from tests.support.intake_checks import marked_texts, write_lines
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"
OF_TOKENIZER = ("--tokenizer", TOKENIZER)

_END = "<|im_end|>"
_USER, _ASSISTANT = "<|im_start|>user⏎", "<|im_start|>assistant⏎"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def turn(speaker: str, text: str) -> dict[str, str]:
    return {"from": speaker, "value": text}


_CHAT = tuple(f"{_USER}Color?{_END}⏎{_ASSISTANT}⟦{answer}{_END}⟧⏎" for answer in ("Blue.", "Red."))
_TEXT = tuple(f"The sky is⟦ {answer}.{_END}⟧" for answer in ("blue", "green"))
_ANSWERS = {"chosen": [assistant("Blue.")], "rejected": [assistant("Red.")]}
_WHOLE = {name: [user("Color?"), *answer] for name, answer in _ANSWERS.items()}
_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

PAIRS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "texts behind a prompt": ({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, _TEXT),
    "texts that begin alike": ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, _TEXT),
    "a text that goes on": (
        {"chosen": "The sky", "rejected": "The sky is"},
        (f"The sk⟦y{_END}⟧", f"The sk⟦y is{_END}⟧"),
    ),
    "texts behind an empty prompt": (
        {"prompt": "", "chosen": "The sky", "rejected": "The sea"},
        (f"The⟦ sky{_END}⟧", f"The⟦ sea{_END}⟧"),
    ),
    "an empty instruction with input": (
        {"instruction": "", "input": "Color?", "chosen": "Blue.", "rejected": "Red."},
        _CHAT,
    ),
    "messages behind a prompt": ({"prompt": [user("Color?")], **_ANSWERS}, _CHAT),
    "messages that begin alike": (_WHOLE, _CHAT),
    "a prompt that is repeated": ({"prompt": "Color?", **_WHOLE, "score_chosen": 9.5}, _CHAT),
    "messages that repeat their prompt": ({"prompt": [user("Color?")], **_WHOLE}, _CHAT),
    "messages behind a text": ({"prompt": "Color?", **_ANSWERS}, _CHAT),
    "texts behind messages": ({"prompt": [user("Color?")], "chosen": "Blue.", "rejected": "Red."}, _CHAT),
    "one message each behind turns": (
        {
            "conversations": [turn("human", "Hi!"), turn("gpt", "Yes?"), turn("human", "Color?")],
            "chosen": turn("gpt", "Blue."),
            "rejected": turn("gpt", "Red."),
        },
        tuple(f"{_USER}Hi!{_END}⏎{_ASSISTANT}Yes?{_END}⏎{each}" for each in _CHAT),
    ),
    "an instruction with input": (
        {"instruction": "Color?", "input": "Sky.", "chosen": "Blue.", "rejected": "Red."},
        tuple(each.replace("Color?", "Color?⏎Sky.") for each in _CHAT),
    ),
    "a question with a system": (
        {"system": "Be brief.", "question": "Color?", "chosen": "Blue.", "rejected": "Red."},
        tuple(f"<|im_start|>system⏎Be brief.{_END}⏎{each}" for each in _CHAT),
    ),
    "lists as JSON": ({name: json.dumps(messages) for name, messages in _WHOLE.items()}, _CHAT),
    "several turns": (
        {"chosen": [*_WHOLE["chosen"], user("Sure?"), assistant("Yes.")], "rejected": _WHOLE["rejected"]},
        (f"{_CHAT[0]}{_USER}Sure?{_END}⏎{_ASSISTANT}⟦Yes.{_END}⟧⏎", _CHAT[1]),
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def analyzed(*records: dict[str, Any], name: str = "a.jsonl", **options: Any) -> Analysis:
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(list(records)), name)
    else:
        write_lines(Path(name), list(records))
    analysis = analyze(name, "out", IntakeOptions(**options), tokenizer=TOKENIZER)
    assert list(validate("out").violations) == []
    return analysis


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("shape", PAIRS)
def test_a_pair_is_two_sequences_of_one_group_of_which_the_answers_count(shape: str, name: str) -> None:
    record, rendered = PAIRS[shape]
    analysis = analyzed(record, record, name=name)
    assert analysis.samples == "preference"
    assert marked_texts(analysis) == [*rendered] * 2
    assert (analysis.group, analysis.label) == (pytest.approx([0, 0, 2, 2]), pytest.approx([1, 0, 1, 0]))
    assert analysis.record.tolist() == [0, 0, 1, 1]
    unread = {"score_chosen"} & record.keys()
    assert {*analysis.manifest["sources"][0]["unread_keys"]} == unread
    shown = view_record(f"{name}:1" if name == "a.jsonl" else f"{name}, record 0", tokenizer=TOKENIZER)
    assert [one.num_target_tokens for one in shown.sequences["rendered"]] == analysis.num_target_tokens[:2].tolist()


def test_a_pair_of_one_answer_is_left_out_where_that_is_asked_for() -> None:
    for name in ("chosen", "rejected"):
        records = [_WHOLE, {key: value for key, value in _WHOLE.items() if key != name}, _WHOLE]
        with pytest.raises(DataError, match=rf"a\.jsonl:2: .*`{name}`"):
            analyzed(*records)
        assert analyzed(*records, on_error="skip").record.tolist() == [0, 0, 2, 2]


@given(st.lists(st.sampled_from("ab c"), max_size=8), st.lists(st.sampled_from("ab c"), max_size=8), st.booleans())
def test_the_prompt_of_a_pair_is_all_that_both_begin_with(one: list[str], other: list[str], is_text: bool) -> None:
    """As TRL's `extract_prompt` has it: of texts without one space at the end, of messages with one left to each."""
    begin = "xy" if is_text else ["xy"]
    chosen, rejected = (begin + ("".join(each) if is_text else each) for each in (one, other))  # type: ignore[operator]
    if chosen == rejected and is_text:
        return
    if not is_text and 1 in (len(chosen), len(rejected)):
        return
    prompt, answers = split_pair({"c": chosen, "r": rejected}, "prompt", ("c", "r"))
    assert [prompt + answers[0], prompt + answers[1]] == [chosen, rejected]
    shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if shared is None and is_text:
        assert len(prompt) == min(map(len, (chosen, rejected))) - 1
    elif shared is not None:
        assert len(prompt) == shared - (is_text and chosen[shared - 1] == " ")
    assert is_text or all(answers)


def test_tools_and_variables_of_a_pair_go_to_the_template_of_both() -> None:
    chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    Path("template.jinja").write_text("{{ tools[0].function.name }} {{ effort }}\n" + chatml + prompt)
    write_lines(Path("a.jsonl"), [{**_WHOLE, "tools": _TOOLS, "chat_template_kwargs": {"effort": "high"}}])
    analysis = analyze("a.jsonl", "out", tokenizer=TOKENIZER, chat_template="template.jinja")
    assert marked_texts(analysis) == [f"look high⏎{each}" for each in _CHAT]
    with pytest.raises(ChunkplanError, match="`tools` beside a prompt that is a string"):
        analyzed({"question": "Color?", "chosen": "Blue.", "rejected": "Red.", "tools": _TOOLS})


REFUSED_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "cut apart": (
        _WHOLE,
        {"max_length": 5},
        r"a\.jsonl:1: 19 tokens, more than 5, and a pair that is cut",
        "--overlong",
    ),
    "a turn a sequence": (_WHOLE, {"turns": "each"}, "--train-turns each with preference pairs", "last"),
    "no prompt": (_ANSWERS, {}, "share no message", "`prompt`"),
    "texts that differ": ({"chosen": "a b", "rejected": "c d"}, {}, "begin differently", "`prompt`"),
    "one text twice": ({"chosen": "a b", "rejected": "a b"}, {}, "are the same text", "`prompt`"),
    "a text and messages": ({**_WHOLE, "chosen": "Blue."}, {}, "`chosen` is a string and `rejected` is a list", "fix"),
    "no answer": (
        {"prompt": [user("a")], **_ANSWERS, "rejected": [user("b")]},
        {},
        "nothing of `rejected`",
        "assistant",
    ),
    "a weight": ({**_WHOLE, "loss_weight": 0.5}, {}, "`loss_weight` is 0.5", "--ignore-column"),
    "context": ({**_WHOLE, "context": "It is night."}, {}, "`context` beside a prompt", "into the prompt"),
    "as messages": (
        {**_WHOLE, "messages": _WHOLE["chosen"]},
        {"schema": "messages"},
        "a preference pair",
        "preference",
    ),
    "an older layout": (
        {"input": {}, "preferred_output": [assistant("a")], "non_preferred_output": [assistant("b")]},
        {},
        "a preference pair",
        "`prompt`, `chosen` and `rejected`",
    ),
}


@pytest.mark.parametrize("why", REFUSED_PAIRS)
def test_a_pair_that_is_none_stops_the_run_with_its_record(why: str) -> None:
    record, options, found, hint = REFUSED_PAIRS[why]
    with pytest.raises(ChunkplanError, match=found) as caught:
        analyzed(record, **options)
    assert hint in caught.value.hint


def test_a_pair_is_dropped_whole_and_counted_once() -> None:
    long = {"prompt": [user("Color?")], "chosen": [assistant("Blue.")], "rejected": [assistant("Red. " * 9)]}
    analysis = analyzed(_WHOLE, long, _WHOLE, max_length=20, long="drop")
    assert analysis.record.tolist() == [0, 0, 2, 2]
    assert analysis.manifest["rejected"] == {"too-long": 1}
    assert analyzed(_WHOLE, long, max_length=20, on_error="skip").manifest["rejected"] == {"too-long": 1}


def test_tokens_merged_over_the_end_of_a_prompt_in_one_text_count_in_both() -> None:
    """The letters that both begin with end within a token of one: from there on all is the answer of each."""
    analysis = analyzed({"chosen": "It was understanding", "rejected": "It was under stress"})
    tokens = analysis.tokens()
    (chosen, one), (rejected, other) = tokens(0), tokens(1)
    first = int(np.argmax(one))
    assert int(np.argmax(other)) == first and one[first:].all() and other[first:].all()
    assert chosen[:first].tolist() == rejected[:first].tolist()


def test_labels_of_answers_are_kept_where_that_is_asked_for() -> None:
    records = [{"prompt": "a", "completion": " b", "label": n != 1} for n in range(3)]
    analysis = analyzed(*records, undesirable="keep")
    assert (analysis.samples, analysis.manifest["sample_columns"]) == ("labelled", ["label"])
    assert analysis.label is not None and analysis.label.tolist() == [True, False, True] and analysis.group is None
    assert analyzed(*records, undesirable="drop").samples is None
    with pytest.raises(ChunkplanError, match=r"a\.jsonl:2: `label` is false") as caught:
        analyzed(*records)
    assert "--kto-negatives keep" in caught.value.hint
    with pytest.raises(ChunkplanError, match=r"a\.jsonl:4: `label` is missing, expected true"):
        analyzed(*records, {"prompt": "a", "completion": " b"}, undesirable="keep")
    with pytest.raises(ChunkplanError, match="no answer is labelled in data of schema text"):
        analyzed({"text": "Some words."}, undesirable="keep")
    kept = analyzed({"messages": _WHOLE["chosen"], "kto_tag": 0}, max_length=18, undesirable="keep")
    assert kept.label is not None and not kept.label.any() and kept.num_tokens.tolist() == [18]


_IDS = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
_PARTS = {"prompt_ids": [5, 6], "completion_ids": [7, 8]}
_LOGPS = [-1.0, -0.5]

#: Records, their group, and the columns of tokens of the last.
ROLLOUTS: dict[str, tuple[list[dict[str, Any]], list[int], dict[str, Any], dict[str, list[float]]]] = {
    "rewards": ([{**_IDS, "reward": n} for n in (1, 0.5)], [0, 0], {"reward": [1, 0.5]}, {}),
    "other prompts": (
        [{**_IDS, "input_ids": ids, "rewards": True} for ids in ([5, 6, 7, 8], [5, 1, 7, 8], [5, 6, 1, 1])],
        [0, 1, 0],
        {"reward": [1, 1, 1]},
        {},
    ),
    "a number each, groups by key": (
        [{**_IDS, "advantages": n / 2, "uid": "aba"[n], "score": n} for n in range(3)],
        [0, 1, 0],
        {"advantage": [0, 0.5, 1], "reward": [0, 1, 2]},
        {},
    ),
    "lists as long as tokens": (
        [{**_IDS, "advantages": [9, 9, 1, 2.5], "old_logprobs": [None, None, *_LOGPS]}],
        [0],
        {},
        {"advantages": [0, 0, 1, 2.5], "old_log_probs": [0, 0, *_LOGPS]},
    ),
    "TRL": (
        [
            {
                **_PARTS,
                "completion_mask": [1, 0],
                "advantages": 0.5,
                "old_per_token_logps": _LOGPS,
                "ref_per_token_logps": _LOGPS,
            }
        ],
        [0],
        {"advantage": [0.5]},
        {"old_log_probs": [0, 0, -1, 0], "reference_log_probs": [0, 0, -1, 0]},
    ),
    "verl, padded": (
        [
            {
                "prompts": [0, 5, 6],
                "responses": [7, 8, 0],
                "input_ids": [0, 5, 6, 7, 8, 0],
                "attention_mask": [0, 1, 1, 1, 1, 0],
                "response_mask": [1, 1, 0],
                "advantages": [1.0, 2.0, 3.0],
                "old_log_probs": [*_LOGPS, 0.0],
                "ref_log_prob": [*_LOGPS, 0.0],
                "uid": "q",
            }
        ],
        [0],
        {},
        {"advantages": [0, 0, 1, 2], "old_log_probs": [0, 0, *_LOGPS], "reference_log_probs": [0, 0, *_LOGPS]},
    ),
    "slime": (
        [
            {
                "tokens": [5, 6, 7, 8],
                "response_length": 2,
                "loss_mask": [1, 1],
                "reward": 1.0,
                "rollout_log_probs": _LOGPS,
                "group_index": n % 2,
            }
            for n in range(4)
        ],
        [0, 1, 0, 1],
        {"reward": [1] * 4},
        {"old_log_probs": [0, 0, *_LOGPS]},
    ),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("shape", ROLLOUTS)
def test_rollouts_are_sequences_of_groups_with_the_numbers_that_the_data_have(shape: str, name: str) -> None:
    records, group, numbers, of_tokens = ROLLOUTS[shape]
    columns = {"input_ids": "tokens"} if "tokens" in records[0] else {}
    analysis = analyzed(*records, name=name, columns=columns)
    assert analysis.samples == "rollouts" and analysis.group is not None and analysis.group.tolist() == group
    for column in ("reward", "advantage"):
        found = getattr(analysis, column)
        assert found is None if column not in numbers else found.tolist() == numbers[column]
    last = np.array([len(records) - 1])
    length = analysis.num_tokens[-1:].astype(np.int64)
    assert analysis.token_columns == tuple(of_tokens)
    found = {column: analysis.tokens().column(column, last, length * 0, length).tolist() for column in of_tokens}
    assert found == of_tokens
    ids, target = analysis.tokens()(len(records) - 1)
    assert target.sum() == (1 if shape == "TRL" else 2) and (shape == "other prompts" or ids.tolist() == [5, 6, 7, 8])


REFUSED_ROLLOUTS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "neither rewards nor advantages": (
        [{**_IDS, "old_log_probs": [0, 0, *_LOGPS]}],
        {},
        "neither a reward nor an advan",
    ),
    "one without a reward": ([{**_IDS, "reward": 1}, _IDS], {}, r"a\.jsonl:2: `reward` is missing or null"),
    "one with more": (
        [{**_IDS, "reward": 1}, {**_IDS, "reward": 1, "old_log_probs": []}],
        {},
        "1: `old_log_probs` is missing or null",
    ),
    "a list and a number": ([{**_IDS, "advantage": 1}, {**_IDS, "advantage": [1] * 4}], {}, "a list, and a number in"),
    "another length": ([{**_IDS, "advantages": [1, 1, 1]}], {}, "`advantages` has 3 entries, and there are 4 tokens"),
    "another length than a response": ([{**_PARTS, "advantages": [1, 1, 1]}], {}, "4 tokens, 2 of them sampled"),
    "null at a target": ([{**_IDS, "advantages": [1, 1, None, 1]}], {}, r"`advantages\[2\]` is null"),
    "a text": ([{**_IDS, "reward": "high"}], {}, "`reward` is a string"),
    "above 0": ([{**_IDS, "reward": 1, "old_log_probs": [0, 0, 1, 0]}], {}, "`old_log_probs` has 1 at a target"),
    "two that differ": ([{**_IDS, "reward": 1, "rewards": 2}], {}, "`reward` and `rewards` both have its reward"),
    "no target": ([{**_IDS, "loss_mask": [0] * 4, "reward": 1}], {}, "nothing of it counts"),
    "a group of texts": ([{"prompt": "a", "completion": " b", "reward": -1.0}], {}, "`reward` is not read"),
    "rewards of messages": ([{"messages": _WHOLE["chosen"], "rewards": {"fit": 0}}], {}, "`rewards` is not read"),
    "an advantage of a text": ([{"text": "a b", "advantage": 0}], {}, "`advantage` is not read"),
    "advantages of an answer": ([{"question": "a", "answer": "b", "advantages": [0.5]}], {}, "`advantages` is not r"),
    "a group without rewards": ([{"prompt_ids": [5], "completion_ids": [6], "uid": "x"}], {}, "`uid` is not read"),
    "a score alone": ([{"prompt_ids": [5], "completion_ids": [6], "score": 0.5}], {}, "`score` is not read"),
    "an empty answer": (
        [{"prompt_ids": [5], "completion_ids": [], "reward": 1}],
        {},
        "`completion_ids` has no tok",
    ),
    "nothing but padding": ([{**_IDS, "attention_mask": [0] * 4, "reward": 1}], {}, "is all 0, and what is compared"),
    "no mask": ([{"input_ids": [5, 6], "reward": 1}], {}, "nothing says which tokens were sampled"),
    "a packed row": ([{**_IDS, "position_ids": [0, 1, 0, 1], "reward": 1}], {}, "a packed row of several documents"),
    "a list that nothing reads": ([{**_IDS, "reward": 1, "returns": [0.0] * 4}], {}, "`returns` is not read"),
    "cut": (
        [{**_IDS, "reward": 1}],
        {"max_length": 3},
        r"a\.jsonl:1: 4 tokens, more than 3, and a rollout that is cut",
    ),
    "sampled": ([{**_IDS, "reward": 1}], {"sample": 0.5}, "--sample takes groups of rollouts apart"),
}


@pytest.mark.parametrize("why", REFUSED_ROLLOUTS)
def test_rollouts_that_are_none_stop_the_run_with_their_record(why: str) -> None:
    records, options, found = REFUSED_ROLLOUTS[why]
    with pytest.raises(ChunkplanError, match=found):
        analyzed(*records, **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_of_a_table_that_are_none_stop_the_run(value: float) -> None:
    for column in ({"reward": value}, {"advantages": [0.0, 0.0, value, 0.0]}):
        with pytest.raises(ChunkplanError, match=r"a\.parquet, record 0: `(reward|advantages\[2\])` is (nan|inf)"):
            analyzed({**_IDS, **column}, name="a.parquet")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_named_with_their_line(value: str) -> None:
    write_lines(Path("a.jsonl"), [{**_IDS, "reward": 1.0}])
    Path("a.jsonl").write_text(Path("a.jsonl").read_text() * 2 + json.dumps({**_IDS, "reward": float(value)}))
    with pytest.raises(DataError, match=rf"a\.jsonl:3: not JSON: {value} is no number there"):
        analyze("a.jsonl", "out", tokenizer=TOKENIZER)


def test_numbers_of_any_name_are_rollouts_where_the_user_says_so() -> None:
    found = analyzed({**_IDS, "r": 2.0, "q": "x"}, {**_IDS, "r": 3.0, "q": "y"}, columns={"reward": "r", "group": "q"})
    assert found.reward is not None and found.reward.tolist() == [2, 3]
    assert found.group is not None and found.group.tolist() == [0, 1]
    scored = analyzed({**_IDS, "score": 0.5}, name="a.parquet", columns={"reward": "score"})
    assert scored.reward is not None and scored.reward.tolist() == [0.5]
    with pytest.raises(ChunkplanError, match="--column group=q, and nothing says that the tokens were sampled"):
        analyzed({**_IDS, "q": "x"}, columns={"group": "q"})


def test_ordinary_tokens_may_have_a_score_and_a_group() -> None:
    assert analyzed({**_IDS, "score": 0.5, "uid": "x"}).samples is None
    assert analyzed({"prompt": "a", "completion": " b", "reward": 0}, ignore_columns=("reward",)).samples is None
    assert marked_texts(analyzed({"prompt_ids": [90, 91], "response_ids": [92]})) == ["{|⟦}⟧"]


def test_data_of_two_kinds_are_refused_by_the_names_of_their_sources() -> None:
    write_lines(Path("in/pairs.jsonl"), [_WHOLE])
    write_lines(Path("in/text.jsonl"), [{"text": "Some words."}])
    with pytest.raises(ChunkplanError, match=r"pairs\.jsonl has preference pairs, and .*text\.jsonl has ordinary data"):
        analyze("in", "out", tokenizer=TOKENIZER)
    write_lines(Path("in/text.jsonl"), [{**_IDS, "reward": 1}])
    write_lines(Path("in/pairs.jsonl"), [{**_IDS, "advantage": 1}])
    with pytest.raises(ChunkplanError, match=r"rollouts with group, advantage, and .* rollouts with group, reward"):
        analyze("in", "out", tokenizer=TOKENIZER)


@pytest.mark.parametrize("kind", ["preference", "labelled", "rollouts"])
def test_pieces_shards_and_the_cache_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups go over pieces of files, and are those of one source each."""
    options = IntakeOptions(undesirable="keep" if kind == "labelled" else "error")
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        records = [dict(_WHOLE)] * 100
        if kind == "labelled":
            records = [{"prompt": "a", "completion": " b", "label": bool(random.integers(2))} for _ in range(100)]
        if kind == "rollouts":
            key = random.integers(0, 20, 100).tolist()
            records = [{**_IDS, "reward": n, "advantages": [n] * 4, "group": each} for n, each in enumerate(key)]
        write_lines(Path(f"in/{name}.jsonl"), records)
    whole = analyze("in", "whole", options, tokenizer=TOKENIZER)
    assert analyze("in", "again", options, tokenizer=TOKENIZER).content_hash == whole.content_hash
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 2_000)
    cut = analyze("in", "cut", options, tokenizer=TOKENIZER, cache="other", workers=2)
    assert cut.content_hash == whole.content_hash
    assert list(validate("cut").violations) == []
    for number in (1, 2):
        request = IntakeRequest(paths="in", options=options, tokenizer=TOKENIZER, cache=Path("third"))
        write_shard(request, f"shard-{number}", (number, 2))
    assert merge(["shard-1", "shard-2"], "merged").content_hash == whole.content_hash
    if kind == "rollouts":
        group = load_analysis("merged").group
        assert group is not None and (group[:100] < 100).all() and (group[100:] >= 100).all()


def test_without_tokens_there_are_groups_and_labels_and_nothing_of_tokens() -> None:
    records = [{**_IDS, "reward": 1, "advantages": [1.0] * 4}] * 2
    analysis = analyzed(*records, tokens=False)
    assert analysis.manifest["sample_columns"] == ["group", "reward"] and not analysis.has_tokens
    write_lines(Path("b.jsonl"), [_WHOLE])
    estimated = analyze("b.jsonl", "out")
    assert estimated.label is not None and estimated.label.tolist() == [True, False] and not estimated.is_exact


def test_declared_pairs_are_read_as_pairs() -> None:
    Path("dataset_info.json").write_text(json.dumps({"one": {"file_name": "a.jsonl", "ranking": True}}))
    write_lines(Path("a.jsonl"), [{"instruction": "Color?", "chosen": "Blue.", "rejected": "Red."}])
    assert marked_texts(analyze("dataset_info.json", "out", tokenizer=TOKENIZER)) == [*_CHAT]
    entry = {"path": "b.jsonl", "type": "chat_template.default", "field_messages": "asked", "field_chosen": "chosen"}
    Path("axolotl.yaml").write_text(yaml.safe_dump({"rl": "dpo", "datasets": [entry]}))
    write_lines(Path("b.jsonl"), [{"asked": [user("Color?")], **_ANSWERS}])
    assert marked_texts(analyze("axolotl.yaml", "out", tokenizer=TOKENIZER)) == [*_CHAT]


def test_what_takes_every_answer_as_one_to_be_learnt_refuses_samples() -> None:
    analyzed(_WHOLE)
    for attempt in (lambda: open_source(Path("out"), chunk_size=64), lambda: open_rows("out", 64)):
        with pytest.raises(UsageError, match=r"an export takes every answer .* out is of preference pairs") as caught:
            attempt()
        assert "--loss dpo" in caught.value.hint


def test_the_command_says_what_it_found(command: Run) -> None:
    same = {"prompt": [user("x")], "chosen": [assistant("y")], "rejected": [assistant("y")]}
    write_lines(Path("pairs.jsonl"), [_WHOLE, _WHOLE, same])
    err = command("analyze", "pairs.jsonl", *OF_TOKENIZER).err
    assert "preference pairs: 3 (" in err
    assert "the chosen answer is the rejected one in 1 pair, the first of pairs.jsonl:3" in err
    assert "3 records + 3 more of pairs = 6 sequences" in err
    shown = command("inspect", "--record", "pairs.jsonl:1", *OF_TOKENIZER).out
    assert "chosen: 19 tokens" in shown and "⟦Red.<|im_end|>⟧" in shown
    write_lines(Path("kto.jsonl"), [{"prompt": "a", "completion": " b", "label": n < 1} for n in range(4)])
    err = command("analyze", "kto.jsonl", *OF_TOKENIZER, "--kto-negatives", "keep").err
    assert "labelled answers: 4, 25.0% of them good" in err
    write_lines(Path("rollouts.jsonl"), [{**_IDS, "reward": n, "uid": n // 2} for n in range(4)])
    assert "rollouts: 4, in 2 groups (2 of 2) (with reward)" in command("analyze", "rollouts.jsonl", *OF_TOKENIZER).err
    write_lines(
        Path("some.jsonl"), [{"prompt_ids": [5], "completion_ids": [6] * (1 + n % 4), "reward": n} for n in range(8)]
    )
    err = command("analyze", "some.jsonl", *OF_TOKENIZER, "--max-length", 4, "--overlong", "drop").err
    assert "2 rollouts left out: the others of a group are compared without them" in err
    write_lines(Path("single.jsonl"), [{**_IDS, "reward": n, "uid": n} for n in range(4)])
    assert "every group has one rollout" in command("analyze", "single.jsonl", *OF_TOKENIZER).err
