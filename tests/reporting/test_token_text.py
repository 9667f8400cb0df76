"""Tokens as text again, and text that no terminal has to fear."""

from __future__ import annotations

import io
import unicodedata

import numpy as np
import tiktoken
from rich.console import Console

from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.backends.chat_templates import TemplateChoice
from chunkplan.intake.backends.tiktoken_name import make
from chunkplan.reporting.token_text import decode_pieces
from chunkplan_cli.terminal import visible
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"


def test_no_character_is_left_that_is_invisible_or_a_control() -> None:
    console = Console(file=io.StringIO())
    every = "".join(map(chr, range(0x3000)))
    shown = visible(every, console)
    assert {unicodedata.category(letter) for letter in shown.replace("\n", "")}.isdisjoint({"Cc", "Cf", "Zl", "Zp"})
    assert visible("one\ntwo", console) == "one␊\ntwo"
    ascii_only = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert visible("é\x1b", ascii_only) == "\\xe9\\u241b"


def test_ids_that_are_no_tokens_are_shown_as_such() -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    ids = [*tokenizer.library.texts(["one two"])[0].tolist(), 99_999, -5]
    target = np.array([False, *[True] * (len(ids) - 1)])
    pieces = decode_pieces(tokenizer.library, np.array(ids, np.int32), target, 0)
    assert "".join(piece.text for piece in pieces) == "one two[token 99999][token -5]"
    assert sum(piece.num_tokens for piece in pieces) == len(ids)


def test_a_border_within_a_character_shows_on_both_sides() -> None:
    """An encoding of tiktoken in which every byte is a token, and ids from 256 to 299 are none."""
    bytes_only = {bytes([value]): value for value in range(256)}
    encoding = tiktoken.Encoding(
        "bytes", pat_str=".", mergeable_ranks=bytes_only, special_tokens={"<|endoftext|>": 300}
    )
    backend = make("tiktoken:bytes", encoding, TemplateChoice(None, None)).library
    ids = [*"aé日".encode(), 260, 300]
    target = np.arange(len(ids)) >= 2  # from the second byte of é on
    pieces = decode_pieces(backend, np.array(ids, np.int32), target, 0)
    assert [(piece.text, piece.is_target, piece.num_tokens) for piece in pieces] == [
        ("a\ufffd", False, 2),
        ("\ufffd日", True, 4),
        ("[token 260]", True, 1),
        ("<|endoftext|>", True, 1),
    ]
    assert [piece.is_special for piece in pieces] == [False, False, False, True]
    [after] = decode_pieces(backend, np.array(ids[:6], np.int32), np.ones(6, np.bool_), 3)
    assert (after.text, after.num_tokens) == ("日", 3), "the first three are there for context only"
