"""Tokenizers from the hub and from tiktoken are what those libraries make of them, and their absence is explained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from tokenizers import Tokenizer, processors

from chunkplan.errors import DataError, UsageError
from chunkplan.extras import pip_install
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.backends.chat_templates import TemplateChoice, read_template
from chunkplan.intake.backends.tiktoken_name import make
from chunkplan.intake.records import Conversation, Message, PromptRecord, Record, TextRecord
from tests.support.intake_checks import encode_all
from tests.support.places import ROOT

SAMPLE = ROOT / "sample_data" / "tokenizer"
RECORDS: list[Record] = [
    TextRecord("It is"),
    TextRecord("It is 日本 😀.<|im_end|>"),
    PromptRecord("Say 日本", "語 😀 <|im_start|>"),
    Conversation((Message("user", "hi"), Message("assistant", "日本 😀"))),
]

LOAD = """
import json, sys
from chunkplan.errors import UsageError
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.records import Conversation, Message, PromptRecord, TextRecord
RECORDS = [
    TextRecord("It is"),
    TextRecord("It is 日本 😀.<|im_end|>"),
    PromptRecord("Say 日本", "語 😀 <|im_start|>"),
    Conversation((Message("user", "hi"), Message("assistant", "日本 😀"))),
]
for name in sys.argv[1:]:
    try:
        loaded = load_tokenizer(name)
    except UsageError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}))
        continue
    encoded = [[one[0].tolist(), one[1].tolist()] for one in loaded.encode(RECORDS if loaded.template else RECORDS[:3])]
    print(json.dumps({"encoded": encoded, "eos": loaded.eos, "hash": loaded.content_hash, "size": loaded.vocab_size}))
"""


def _load_apart(names: list[str], **environment: str) -> list[dict[str, Any]]:
    """What a process of its own, with its own environment, loads under `names`."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *names],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SAMPLE.parent.parent)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def _cache(home: Path, name: str, files: dict[str, str | bytes]) -> None:
    """Put files into a hub cache, as it is on disk after they were fetched."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    for file, content in {
        "refs/main": "1" * 40,
        **{f"snapshots/{'1' * 40}/{key}": files[key] for key in files},
    }.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def test_a_name_on_the_hub_is_the_same_tokenizer_as_its_files(tmp_path: Path) -> None:
    files = {name: (SAMPLE / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    config = json.loads(files["tokenizer_config.json"])
    files["config.json"] = (SAMPLE.parent / "model" / "config.json").read_bytes()
    _cache(tmp_path, "some/one", dict(files))
    ends = Tokenizer.from_file(str(SAMPLE / "tokenizer.json"))
    ends.post_processor = processors.TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", 4095)])
    plain = {"tokenizer.json": ends.to_str(), "tokenizer_config.json": json.dumps(config | {"chat_template": None})}
    _cache(tmp_path, "some/ended", files | plain)
    found, ended, missing = _load_apart(
        ["some/one", "some/ended", "some/missing"], HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1"
    )
    own = load_tokenizer(SAMPLE)
    expected = [[one[0].tolist(), one[1].tolist()] for one in encode_all(own, *RECORDS)]
    assert found["encoded"] == expected
    assert own.eos is not None
    assert (found["eos"], found["size"]) == (list(own.eos), own.vocab_size)
    assert ended["encoded"][0][0] == [*expected[0][0], own.eos[1]]
    assert ended["encoded"][1][0] == expected[1][0]  # it ends with the end already
    assert "there is no tokenizer at some/missing" in missing["error"]
    assert "HF_HOME" in missing["hint"]


@pytest.mark.parametrize("variable", ["HF_ENDPOINT", pytest.param("HTTPS_PROXY", marks=pytest.mark.soak)])
def test_a_hub_that_does_not_answer_is_given_up_at_once_and_what_was_fetched_is_found(
    tmp_path: Path, variable: str
) -> None:
    """Nothing listens there; transformers alone tries again for a minute."""
    files = {name: (SAMPLE / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    files["config.json"] = (SAMPLE.parent / "model" / "config.json").read_bytes()
    _cache(tmp_path, "some/one", dict(files))
    found, missing = _load_apart(
        ["some/one", "some/missing"], HF_HOME=str(tmp_path), **{variable: "http://127.0.0.1:9", "NO_PROXY": ""}
    )
    assert found["size"] == load_tokenizer(SAMPLE).vocab_size
    address = "http://127.0.0.1:9" if variable == "HF_ENDPOINT" else "https://huggingface.co"
    assert f"{address} does not answer, and it was not fetched before" in missing["error"]
    assert "the network and HF_HOME" in missing["hint"]


def test_a_slip_in_a_path_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)  # nobody asks it
    with pytest.raises(UsageError, match="there is no tokenizer at models/qwn") as caught:
        load_tokenizer("models/qwn")
    assert "folder" in caught.value.hint


def test_without_their_libraries_names_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="no tokenizer at some/one") as caught:
        load_tokenizer("some/one")
    assert pip_install("hub") in caught.value.hint
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(UsageError, match="needs tiktoken") as caught:
        load_tokenizer("tiktoken:o200k_base")
    assert pip_install("tiktoken") in caught.value.hint


PLUGIN = """
def tiny():
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {pair: 256 + index for index, pair in enumerate([b"It", b" i", "日".encode(), "日".encode()[:2], b"is"])}
    special = {"<|endoftext|>": 300, "<|im_start|>": 301, "<|im_end|>": 302}
    return {"name": "tiny", "pat_str": r" ?\\\\w+|\\\\W", "mergeable_ranks": ranks, "special_tokens": special}

def endless():
    return {**tiny(), "name": "endless", "special_tokens": {}}

ENCODING_CONSTRUCTORS = {"tiny": tiny, "endless": endless}
""".replace("\\\\", "\\")


def test_a_name_of_tiktoken_is_the_encoding_that_a_plugin_registers(tmp_path: Path) -> None:
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "tiny_plugin.py").write_text(PLUGIN)
    path = f"{SAMPLE.parent.parent}:{tmp_path}"
    tiny, endless, other = _load_apart(["tiktoken:tiny", "tiktoken:endless", "tiktoken:none"], PYTHONPATH=path)
    encoding = _tiny()
    text, whole = "It is 日本 😀.<|im_end|>", "Say 日本語 😀 <|im_start|>"
    assert (tiny["eos"], tiny["size"]) == (["<|endoftext|>", 300], 303)
    assert tiny["encoded"][1][0] == encoding.encode_ordinary(text)
    assert tiny["encoded"][2][0] == [*encoding.encode_ordinary(whole), 300]
    assert endless["eos"] is None
    assert endless["encoded"][2][0] == encoding.encode_ordinary(whole)
    assert tiny["hash"] != endless["hash"]
    assert "tiktoken cannot load tiktoken:none" in other["error"]
    assert "tiny" in other["hint"]


def _tiny() -> tiktoken.Encoding:
    names: dict[str, Any] = {}
    exec(PLUGIN, names)
    return tiktoken.Encoding(**names["tiny"]())


def test_masks_of_tiktoken_are_those_of_its_own_offsets(tmp_path: Path) -> None:
    encoding = _tiny()
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    loaded = make("tiktoken:tiny", encoding, _choice(template))
    for content in ("It is", "日本 😀", " <|im_end|>", "é日<|endoftext|>"):
        (prompt_ids, prompt_target), (chat_ids, chat_target) = encode_all(
            loaded, PromptRecord("It 日", content), Conversation((Message("user", "日"), Message("assistant", content)))
        )
        whole = "It 日" + content
        _, starts = encoding.decode_with_offsets(prompt_ids[:-1].tolist())
        assert prompt_ids.tolist() == [*encoding.encode_ordinary(whole), 300]
        assert prompt_target.tolist() == [*(start >= 4 for start in starts), True]
        rendered = f"<|im_start|>user 日<|im_end|><|im_start|>assistant {content}<|im_end|>"
        _, starts = encoding.decode_with_offsets(chat_ids.tolist())
        assert chat_ids.tolist() == encoding.encode(rendered, allowed_special="all")
        border = rendered.index("assistant ") + len("assistant ")
        assert chat_target.tolist() == [start >= border for start in starts]
        assert chat_ids.dtype == np.int32


def _choice(path: Path) -> TemplateChoice:
    return TemplateChoice(read_template(path), None)


def test_a_given_chat_template_takes_the_place_of_the_tokenizers_own(tmp_path: Path) -> None:
    jinja = tmp_path / "chat.jinja"
    jinja.write_text("{{ messages[0].content }}")
    as_json = tmp_path / "chat_template.json"
    as_json.write_text(json.dumps({"chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}]}))
    conversation = Conversation((Message("user", "hi"),))
    own = load_tokenizer(SAMPLE)
    for file in (jinja, as_json):
        loaded = load_tokenizer(SAMPLE, file)
        assert loaded.template is not None
        assert loaded.template.render(conversation)[0] == "hi"
        assert loaded.content_hash == own.content_hash
        assert loaded.identity != own.identity


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat.json", "{}", "no `chat_template` in it"),
        ("chat.json", "[", "not JSON"),
        ("chat.jinja", "{% if %}", "not Jinja"),
        ("chat.jinja", b"\xff", "not UTF-8"),
    ],
)
def test_a_given_chat_template_that_is_none_is_named(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(SAMPLE, file)
    assert caught.value.where == str(file)
    with pytest.raises(UsageError, match="cannot read the chat template"):
        load_tokenizer(SAMPLE, tmp_path / "missing.jinja")


def test_what_tokens_depend_on_is_in_the_identity(tmp_path: Path) -> None:
    config = json.loads((SAMPLE / "tokenizer_config.json").read_text())
    found = set()
    for index, change in enumerate(
        [{}, {"add_eos_token": True}, {"eos_token": "<|endoftext|>"}, {"chat_template": "x"}, {"bos_token": "a"}]
    ):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes((SAMPLE / "tokenizer.json").read_bytes())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | change))
        found.add(load_tokenizer(folder).identity)
    assert len(found) == 5
    assert load_tokenizer(tmp_path / "0").identity in found
