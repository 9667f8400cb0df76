"""Data as LLaMA-Factory and axolotl declare them: each entry is read as it says, or refused by the name of its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from chunkplan import analyze
from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan.intake.recipes import declared
from tests.support.intake_checks import marked_texts, write_lines
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"

_END = "<|im_end|>"
_USER, _ASSISTANT = "<|im_start|>user⏎", "<|im_start|>assistant⏎"
_ASKED = f"{_USER}Hi!{_END}⏎{_ASSISTANT}⟦Hello.{_END}⟧⏎"
_ALPACA = {"instruction": "Hi!", "input": "", "output": "Hello."}
_TURNS = [{"from": "human", "value": "Hi!"}, {"from": "gpt", "value": "Hello."}]
_OWN = [{"speaker": "usr", "utterance": "Hi!"}, {"speaker": "bot!", "utterance": "Hello."}]
_USUAL = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]
_OWN_TAGS = {"role_tag": "speaker", "content_tag": "utterance", "user_tag": "usr", "assistant_tag": "bot!"}

#: Entry of a dataset_info.json without its file, the record there, and what is rendered of it.
LLAMA_FACTORY: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, _ALPACA, _ASKED),
    (
        {"columns": {"prompt": "q", "query": "more", "response": "a", "system": "sys"}},
        {"q": "Hi!", "more": "", "a": "Hello.", "sys": "Be brief."},
        f"<|im_start|>system⏎Be brief.{_END}⏎{_ASKED}",
    ),
    ({"columns": {"prompt": "body"}}, {"body": "Some words."}, "Some⟦ words.⟧"),
    ({"formatting": "sharegpt"}, {"conversations": _TURNS}, _ASKED),
    ({"formatting": "sharegpt", "columns": {"messages": "chat"}, "tags": _OWN_TAGS}, {"chat": _OWN}, _ASKED),
    (
        {
            "formatting": "sharegpt",
            "columns": {"messages": "m"},
            "tags": {"role_tag": "role", "content_tag": "content"},
        },
        {"m": _USUAL},
        _ASKED,
    ),
    (
        {"columns": {"prompt": "instruction", "response": "output", "kto_tag": "good"}},
        {**_ALPACA, "good": True},
        _ASKED,
    ),
]

#: Entry of axolotl without its path, the record there, and what is rendered of it.
AXOLOTL: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"type": "alpaca"}, _ALPACA, _ASKED),
    ({"type": "completion", "field": "body"}, {"body": "Some words."}, "Some⟦ words.⟧"),
    ({"type": "chat_template", "train_on_eos": "turn", "roles_to_train": ["assistant"]}, {"messages": _USUAL}, _ASKED),
    (
        {
            "type": "chat_template",
            "field_messages": "chat",
            "message_property_mappings": {"role": "speaker", "content": "utterance"},
            "roles": {"user": ["usr", "human"], "assistant": ["bot!"]},
        },
        {"chat": _OWN},
        _ASKED,
    ),
    (
        {"type": {"field_instruction": "q", "field_output": "a"}},
        {"q": "Hi!", "a": "Hello."},
        _ASKED,
    ),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write_llama_factory(**entries: Any) -> None:
    Path("data").mkdir(exist_ok=True)
    Path("data/dataset_info.json").write_text(json.dumps(entries))


def _write_axolotl(*entries: Any, **more: Any) -> None:
    Path("axolotl.yaml").write_text(yaml.safe_dump({"base_model": "x", "datasets": list(entries), **more}))


@pytest.mark.parametrize(("entry", "record", "rendered"), LLAMA_FACTORY)
def test_an_entry_of_llama_factory_is_read_as_it_says(
    entry: dict[str, Any], record: dict[str, Any], rendered: str
) -> None:
    _write_llama_factory(one={"file_name": "a.json", **entry}, other={"file_name": "none.json", "ranking": True})
    Path("data/a.json").write_text(json.dumps([record]))
    analysis = analyze("data/dataset_info.json:one", "out", tokenizer=TOKENIZER)
    assert marked_texts(analysis) == [rendered]
    assert [source["path"] for source in analysis.manifest["sources"]] == ["data/a.json"]


@pytest.mark.parametrize(("entry", "record", "rendered"), AXOLOTL)
def test_an_entry_of_axolotl_is_read_as_it_says(entry: dict[str, Any], record: dict[str, Any], rendered: str) -> None:
    _write_axolotl({"path": "a.jsonl", "ds_type": "json", **entry}, test_datasets=[{"path": "dev.jsonl", **entry}])
    for name in ("a.jsonl", "dev.jsonl"):
        write_lines(Path(name), [record])
    analysis = analyze("axolotl.yaml", "out", tokenizer=TOKENIZER)
    assert marked_texts(analysis) == [rendered, rendered]
    assert [source.get("part", "train") for source in analysis.manifest["sources"]] == ["train", "eval"]


def test_entries_are_sources_each_with_keys_of_its_own_also_where_names_end_alike() -> None:
    _write_llama_factory(
        one={"file_name": "a.jsonl", "columns": {"prompt": "q", "response": "a"}},
        other={"file_name": "in", "formatting": "sharegpt", "columns": {"messages": "chat"}, "tags": _OWN_TAGS},
    )
    Path("data/in").mkdir()
    write_lines(Path("data/a.jsonl"), [{"q": "Hi!", "a": "Hello."}])
    write_lines(Path("data/in/a.jsonl"), [{"chat": _OWN}])
    assert marked_texts(analyze("data/dataset_info.json", "out", tokenizer=TOKENIZER)) == [_ASKED, _ASKED]


def test_a_file_of_an_unknown_suffix_is_of_the_kind_that_the_entry_says() -> None:
    _write_axolotl({"path": "json", "data_files": ["a.data", "b.jsonl"], "type": "alpaca", "ds_type": "json"})
    Path("a.data").write_text(json.dumps([_ALPACA]))
    write_lines(Path("b.jsonl"), [_ALPACA])
    assert len(analyze("axolotl.yaml", "out", tokenizer=TOKENIZER).num_tokens) == 2


@pytest.mark.parametrize(
    ("entry", "key", "lost"),
    [
        ({"ranking": True, "columns": {"prompt": "prompt"}}, "`ranking` is true", "under another key than `prompt`"),
        ({"columns": {"chosen": "a", "rejected": "b"}}, "`chosen` is", "pairs are read where `ranking` is true"),
        ({"num_samples": 500}, "`num_samples` is 500", "all records are read, of which `chunkplan build --mix"),
        ({"folder": "x"}, "`folder` is", "without the key all records are read"),
        ({"formatting": "pairs"}, "`formatting` is", "if the same is to be trained without it"),
        ({"ms_hub_url": "a/b"}, "`ms_hub_url` is", "if the same is to be trained without it"),
        ({"columns": {"prompt": "a", "images": "b"}}, "columns: `images` is", "the text is trained alone"),
        ({"columns": {"prompt": "a", "tools": "b"}}, "columns: `tools` is", "the prompts have no tools"),
        ({"formatting": "sharegpt", "tags": {"robot_tag": "x"}}, "tags: `robot_tag` is", "if the same is"),
    ],
)
def test_what_llama_factory_is_asked_for_and_is_not_done_here_is_named(
    entry: dict[str, Any], key: str, lost: str
) -> None:
    _write_llama_factory(one={"file_name": "a.jsonl", **entry})
    write_lines(Path("data/a.jsonl"), [_ALPACA])
    with pytest.raises(UsageError, match=key) as caught:
        analyze("data/dataset_info.json", "out")
    assert "data/dataset_info.json: one" in caught.value.message
    assert "data/dataset_info.json:NAME,NAME" in caught.value.hint
    assert lost in caught.value.hint


@pytest.mark.parametrize(
    ("entry", "more", "key", "lost"),
    [
        ({"type": "gpteacher"}, {}, "`type` is", "without the key the layout of the records is detected"),
        ({"shards": 4}, {}, "`shards` is 4", "without the key all records are read"),
        ({"split": "train[:10%]"}, {}, "`split` is", "without the key all records are read"),
        ({"train_on_eos": "all"}, {}, "`train_on_eos` is", "every trained answer counts with its end"),
        ({"roles_to_train": ["user", "assistant"]}, {}, "`roles_to_train` is", "the assistant alone is trained"),
        ({"roles_to_train": []}, {}, "`roles_to_train` is", "the assistant alone is trained"),
        (
            {"type": "chat_template", "message_field_training": "learn"},
            {},
            "`message_field_training` is",
            '`"loss": true` in a message of the data',
        ),
        (
            {"type": "chat_template", "message_property_mappings": {"name": "n"}},
            {},
            "message_property_mappings.name` is",
            "rename the key in the data",
        ),
        ({"type": "chat_template", "roles": {"user": ["a", "b"]}}, {}, "`roles.user` is", "if the same is"),
        ({"type": "chat_template", "chat_template": "chatml"}, {}, "`chat_template` is", "--chat-template FILE"),
        (
            {"type": {"field_instruction": "q", "format": "[{instruction}]"}},
            {},
            "type: `format` is",
            "without the key the prompt is the chat template's",
        ),
        ({}, {"rl": "kto"}, "`rl` is", "it may be dpo, ipo, orpo, simpo"),
        ({}, {"train_on_inputs": True}, "`train_on_inputs` is true", "without that the assistant alone is trained"),
        ({}, {"pretraining_dataset": "b"}, "`pretraining_dataset` is", "without the key it is not trained"),
        ({}, {"pretraining_dataset": "b", "datasets": None}, "`pretraining_dataset` is", "name it in `datasets`"),
    ],
)
def test_what_axolotl_is_asked_for_and_is_not_done_here_is_named(
    entry: dict[str, Any], more: dict[str, Any], key: str, lost: str
) -> None:
    _write_axolotl({"path": "a.jsonl", **entry}, **more)
    write_lines(Path("a.jsonl"), [_ALPACA])
    with pytest.raises(UsageError, match=key) as caught:
        analyze("axolotl.yaml", "out")
    assert lost in caught.value.hint


def test_without_names_entries_that_cannot_be_read_are_no_end_where_others_can_be() -> None:
    """The hint names those whose files are here, which are read when it is pasted; others are not looked for."""
    _write_llama_factory(
        some={"file_name": "a.jsonl", "num_samples": 5},
        far={"hf_hub_url": "nobody/nothing"},
        none={"file_name": "none.jsonl"},
        one={"file_name": "a.jsonl"},
        two={"file_name": "b.jsonl"},
        broken=["a.jsonl"],
    )
    for name in ("a", "b"):
        write_lines(Path(f"data/{name}.jsonl"), [_ALPACA])
    with pytest.raises(UsageError, match=r"some: `num_samples` is 5.*\(3 of 6 entries cannot be read\)") as caught:
        analyze("data/dataset_info.json", "out")
    pasted = caught.value.hint.rpartition(": ")[2]
    assert pasted == "data/dataset_info.json:one,two"
    assert len(analyze(pasted, "out", tokenizer=TOKENIZER).num_tokens) == 2


@pytest.mark.parametrize("entry", ["a.jsonl", {"path": "none.jsonl"}, {}])
def test_entries_that_are_none_and_data_that_are_not_there_are_no_traceback(entry: Any) -> None:
    _write_axolotl(entry)
    with pytest.raises(ChunkplanError, match=r"axolotl.yaml: datasets\[0\]"):
        analyze("axolotl.yaml", "out")


def test_a_name_that_is_not_there_and_a_file_in_two_ways_are_refused() -> None:
    one = {"file_name": "a.jsonl", "columns": {"prompt": "q", "response": "a"}}
    _write_llama_factory(one=one, other={**one, "columns": {"prompt": "a", "response": "q"}})
    write_lines(Path("data/a.jsonl"), [{"q": "Hi!", "a": "Hello."}])
    with pytest.raises(UsageError, match="has no dataset third"):
        analyze("data/dataset_info.json:third", "out")
    with pytest.raises(UsageError, match=r"read data/a.jsonl in two ways"):
        analyze("data/dataset_info.json", "out")


def test_files_of_the_same_names_that_declare_nothing_are_read_as_before() -> None:
    Path("dataset_info.json").write_text(json.dumps({"features": {"a": {"dtype": "int64"}}, "splits": {}}))
    Path("b.yaml").write_text("- text: words\n")
    with pytest.raises(UsageError, match=r"b\.yaml has no list `datasets:`"):
        analyze("b.yaml", "out")
    assert declared(["dataset_info.json", "b.yaml", "c.jsonl"]).paths == ["dataset_info.json", "b.yaml", "c.jsonl"]
    Path("dataset_info.json").write_text("{")
    with pytest.raises(DataError, match="not YAML"):
        declared(["dataset_info.json"])


def test_what_is_not_data_is_said() -> None:
    _write_axolotl({"path": "a.jsonl", "type": "alpaca"}, sequence_len=4096, val_set_size=0.05)
    write_lines(Path("a.jsonl"), [_ALPACA])
    assert [note.partition(": ")[2] for note in declared(["axolotl.yaml"]).notes] == [
        "of `type: alpaca` the keys are read; the text around them is the chat template's",
        "only `datasets` and `test_datasets` are read; instead of others: gain --model x, "
        "analyze --max-length 4096 --overlong drop, build --holdout 0.05",
    ]
    _write_axolotl({"path": "a.jsonl"}, test_datasets=[{"path": "a.jsonl"}], val_set_size=0.05)
    assert [note.rpartition(": ")[2] for note in declared(["axolotl.yaml"]).notes] == ["gain --model x"]
