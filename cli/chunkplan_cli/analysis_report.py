"""An analysis in the terminal: its lengths on stdout; of a new one on stderr what was read and how."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten, wrap
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from chunkplan.config.intake import CONVERSATIONS
from chunkplan.errors import ChunkplanError
from chunkplan.quantities import counted, percent, power_of_two
from chunkplan.reporting.tables import Table
from chunkplan_cli.terminal import drawn_table, note, print_json, stderr, stdout, warn

if TYPE_CHECKING:
    from chunkplan.lengths import Estimate, LengthReport, Quantile
    from chunkplan.planfile.analysis import Analysis
    from chunkplan.planfile.manifest import SourceEntry

#: Sources that are listed one by one.
_LISTED = 20

#: Kinds of files that are named of those that are no data, and sources or links of those that there is a warning for.
_KEYS, _NAMED = 8, 5

#: Letters of why a source cannot be read; all of it is in rejected.jsonl.
_LETTERS = 120

#: The path of what was read from the standard input.
_STDIN = "-"

_INDENT = 5 * " "

_KEPT = (
    *("content_hash", "exact", "sample", "sources", "tokenizer", "template_hash", "options", "rejected", "truncated"),
    *("samples", "sample_columns"),
)


def print_analysis(analysis: Analysis, *, as_json: bool, replaced: str | None, beside: Sequence[str] = ()) -> None:
    """Print the length report, the sources and the path of the analysis; `beside` are files that are no data."""
    from chunkplan.lengths import length_report

    report = length_report(analysis)
    if as_json:
        kept = {name: analysis.manifest[name] for name in _KEPT if name in analysis.manifest}
        print_json({"analysis": str(analysis.path), "report": report.to_dict(), **kept})
    else:
        print_length_report(stdout(), report, analysis)
    _say_what_was_read(analysis, beside)
    _say_what_it_is_good_for(analysis)
    note(f"analysis in {analysis.path}" + (f" (replaced {replaced})" if replaced else ""))


def print_next(output: Path | None, workspace: Path | None) -> None:
    """Print the command that most would give next, which works as it is, and what to say in it."""
    where = [*([str(output)] if output else []), *(["--workspace", str(workspace)] if workspace else [])]
    note("next: " + shlex.join(["chunkplan", "gain", *where, "--gpus", "8"]))
    note(f"{_INDENT}(for Qwen2.5-7B on H100s, unless --model and --hardware name yours)")


def say_what_lies_beside(files: Sequence[str]) -> None:
    """Print how many files of folders are no data, and which, by suffix, or by name where the suffix is one of data."""
    from chunkplan.intake.files import name_of
    from chunkplan.intake.sources import describe

    names = [name_of(file) for file in files]
    kinds = Counter(name if name.startswith(".") or describe(name) else f".{name.rpartition('.')[2]}" for name in names)
    named = [f"{count:,} {kind}" for kind, count in sorted(kinds.items(), key=lambda one: (-one[1], one[0]))]
    if names:
        note(*_beside(f"not read, no data: {counted(len(names), 'file')}", f"({_several(named[:_KEYS], len(kinds))})"))


def describe_old(target: Path) -> str | None:
    """Describe what `target` holds now, if it is something that the new analysis replaces."""
    from chunkplan.planfile.manifest import read_manifest

    if not target.is_dir() or not any(target.iterdir()):
        return None
    try:
        manifest = read_manifest(target, "analysis")
        sources = [source["path"] for source in manifest["sources"]]
        several = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
        return f"the analysis of {sources[0]}{several}, {counted(manifest['totals']['num_sequences'], 'sequence')}"
    except (ChunkplanError, LookupError, TypeError):
        return "something that is no analysis this version can read"


def _say_what_was_read(analysis: Analysis, beside: Sequence[str]) -> None:
    all_sources: list[SourceEntry] = analysis.manifest["sources"]
    lost = [source for source in all_sources if _is_lost(source)]
    sources = [source for source in all_sources if source["format"] != "link" and not _is_lost(source)]
    for source in sources[:_LISTED]:
        counts = counted(source["records"], "record")
        if source["rejected"]:
            counts += f", {source['rejected']:,} rejected"
        counts += ", to evaluate on" if source.get("part") == "eval" else ""
        note(*_beside(f"read {_name(source)}: {source['schema'] or 'nothing'}, {counts}", f"({source['evidence']})"))
        _say_what_was_not_read([source], "not read")
    if len(sources) > _LISTED:
        note(f"read {len(sources) - _LISTED:,} more sources; --json lists them all")
        _say_what_was_not_read(sources[_LISTED:], "not read of them")
    say_what_lies_beside(beside)
    evaluated = [_name(source) for source in sources if source.get("part") == "eval"]
    if evaluated:
        names = _several(evaluated[:_NAMED], len(evaluated))
        note(*_beside(f"evaluated on, not trained: {names}", "(files that DATA names themselves are trained)"))
    records = sum(source["records"] for source in all_sources)
    rejected = sum(source["rejected"] for source in all_sources)
    left_out = sum(source["not_sampled"] for source in all_sources)
    more = sum(source.get("more_sequences", 0) for source in all_sources)
    _say_which_turns(analysis, sources)
    _say_which_samples(analysis)
    if rejected or left_out or more:
        turns = sum(source.get("more_sequences", 0) for source in all_sources if source["schema"] in CONVERSATIONS)
        made = counted(records, "record") + (f" + {turns:,} more turns" if turns else "")
        of = "of pairs" if analysis.samples == "preference" else "documents of packed rows"
        made += f" + {more - turns:,} more {of}" if more > turns else ""
        parts = [counted(analysis.num_sequences, "sequence")]
        parts += [f"{rejected:,} rejected"] if rejected else []
        parts += [f"{left_out:,} left out of the sample"] if left_out else []
        note(f"{made} = {' + '.join(parts)}")
    if rejected:
        note(f"rejected records are listed in {analysis.path / 'rejected.jsonl'}")
    _warn_of_lost(lost)
    _warn_of_sources([source for source in all_sources if not _is_lost(source)])
    if sharing := _left_out(sources, "shared"):
        shared = "one token holds the end of a prompt and the begin of an answer"
        note(*_beside(shared, f"({sharing}; it is trained)"))
    _warn_of_left_out(sources)


#: Reasons to reject records that can be read.
_OF_WHAT_IS_READ = frozenset(("empty", "untrained", "undesirable", "template", "too-long"))


def _is_lost(source: SourceEntry) -> bool:
    """True if no record of a source could be read."""
    return source["rejected"] == source["records"] > 0 and _OF_WHAT_IS_READ.isdisjoint(source["reasons"])


def _why_lost(source: SourceEntry) -> str:
    if source["schema"] is None:
        return source["evidence"] or ""
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in source["reasons"].items())
    which = "each" if source["records"] > 1 else "which is"
    return f"{counted(source['records'], 'record')}, {which} rejected ({reasons})"


def _warn_of_lost(sources: list[SourceEntry]) -> None:
    """Name the sources of which nothing could be read, a line each, and what to type to have them read."""
    from chunkplan.intake.schemas.fields import CHOOSE, TRY

    if not sources:
        return
    warn(f"{counted(len(sources), 'source')} cannot be read and {'is' if len(sources) == 1 else 'are'} left out:")
    lines, choices = [], []
    for source in sources[:_LISTED]:
        why, _, line = _why_lost(source).partition(f"; {TRY}")
        why, _, choice = why.partition(f"; {CHOOSE}")
        lines += [line] if line else []
        choices += [f"hint: {_name(source)}: {CHOOSE}{choice}"] if choice else []
        note(*_indented(f"{_name(source)}: {shorten(why, _LETTERS, placeholder=' ...')}"))
    if len(sources) > _LISTED:
        note(f"{_INDENT}and {len(sources) - _LISTED:,} more")
    note(*choices)
    if lines:
        note(f"hint: to have {counted(len(lines), 'source')} of them read, {TRY}{' '.join(lines)}")


#: Words for the trained turns, by `--train-turns`.
_TURNS = {
    "rendered": ("all that the assistant wrote, as rendered", "(others: --train-turns last, --train-turns each)"),
    "last": ("the last turn", "(--train-turns last)"),
    "each": ("every turn, each in a sequence of its own", "(--train-turns each)"),
}


def _say_which_turns(analysis: Analysis, sources: list[SourceEntry]) -> None:
    """Print what of conversations is trained, where there are some and tokens."""
    if analysis.options and analysis.is_exact and any(source["schema"] in CONVERSATIONS for source in sources):
        words, option = _TURNS[analysis.options.turns]
        note(*_beside(f"trained of conversations: {words}", option))
        if thinking := _left_out(sources, "thinking"):
            note(*_indented(f"the chat template leaves out thinking {thinking}"))


def _say_which_samples(analysis: Analysis) -> None:
    """Print what there is of pairs, of labelled answers or of rollouts, and warn of what teaches nothing."""
    if analysis.label is not None:
        good = int(analysis.label.sum())
        tokens = [int(analysis.num_tokens[which].sum(dtype="int64")) for which in (analysis.label, ~analysis.label)]
        if analysis.samples == "preference":
            parts = f"({tokens[0]:,} tokens of the chosen, {tokens[1]:,} of the rejected)"
            note(*_beside(f"preference pairs: {good:,}", parts))
        else:
            share = percent(good / analysis.num_sequences)
            parts = f"({tokens[0]:,} tokens of good ones, {tokens[1]:,} of bad ones)"
            note(*_beside(f"labelled answers: {analysis.num_sequences:,}, {share} of them good", parts))
            if good in (0, analysis.num_sequences):
                warn(f"all answers are labelled {'good' if good else 'bad'}: a loss such as kto compares the two")
    elif analysis.group is not None:
        sizes = Counter(Counter(analysis.group.tolist()).values())
        named = [f"{count:,} of {size:,}" for size, count in sorted(sizes.items(), key=lambda one: (-one[1], one[0]))]
        columns = ", ".join(name for name in analysis.manifest["sample_columns"] if name != "group")
        groups = f"{counted(sizes.total(), 'group')} ({_several(named[:_NAMED], len(named))})"
        note(*_beside(f"rollouts: {analysis.num_sequences:,}, in {groups}", f"(with {columns})"))
        if num_lost := sum(source.get("rejected", 0) for source in analysis.manifest["sources"]):
            warn(f"{counted(num_lost, 'rollout')} left out: the others of a group are compared without them")
        if [*sizes] == [1] and "reward" in analysis.manifest["sample_columns"]:
            warn("every group has one rollout: nothing is compared within it")
            note("hint: name the key of the prompt with --column group=KEY")
    if same := _left_out(analysis.manifest["sources"], "equal"):
        warn(f"the chosen answer is the rejected one {same}: it teaches nothing".replace("sequence", "pair"))


def _say_what_was_not_read(sources: list[SourceEntry], words: str) -> None:
    """Print the keys of records that nothing was made of, the most frequent first."""
    from chunkplan.planfile.manifest import unread_words

    if keys := unread_words(sources):
        note(*_indented(f"{words}: {keys}"))


def _warn_of_sources(sources: list[SourceEntry]) -> None:
    """Warn of what is most likely not meant: sources that are mostly blank, and links that lead to data."""
    groups: dict[str, list[SourceEntry]] = {}
    for source in sources:  # a text file is one record: together they are a corpus
        groups.setdefault("text files" if source["format"] == "text" else _name(source), []).append(source)
    blank = []
    for name, group in groups.items():
        count = sum(source["reasons"].get("empty", 0) for source in group)
        number = sum(source["records"] - source["not_sampled"] for source in group)
        if 2 * count > number:
            blank.append(f"{count:,} of {counted(number, 'record')} in {name}")
    if blank:
        warn(f"mostly blank: {_several(blank[:_NAMED], len(blank))}")
    if links := [source["path"] for source in sources if source["format"] == "link"]:
        warn(f"links to folders are not followed: {_several(links[:_NAMED], len(links))}")
        note("hint: name the folders themselves to have what is in them read")


def _warn_of_left_out(sources: list[SourceEntry]) -> None:
    """Warn of what the chat template leaves out of conversations: of texts, and of tokens that end the last turn."""
    from chunkplan.intake.pieces import LEFT_OUT

    record = ""
    for kind, words in LEFT_OUT.items():
        if kind not in ("thinking", "end") and (lacking := _left_out(sources, kind)):
            warn(f"the chat template leaves out or changes {words} {lacking}")
            record = record or shlex.quote(_first_left_out(sources, kind))
    if record:
        note(f"hint: `chunkplan inspect --record {record}` shows what is left; --chat-template takes another template")
    if lacking := _left_out(sources, "end"):
        warn(f"no end-of-turn token behind the last answer {lacking}: the model is not taught to stop there")
        note("hint: give --chat-template one that puts such a token there; for GLM-4.5 see docs/templates.md")


def _left_out(sources: list[SourceEntry], kind: str) -> str:
    """Return the number of sequences that the chat template leaves this out of, and the first such record."""
    number = sum(source["left_out"].get(kind, 0) for source in sources)
    return f"in {counted(number, 'sequence')}, the first of {_first_left_out(sources, kind)}" if number else ""


def _first_left_out(sources: list[SourceEntry], kind: str) -> str:
    """Return the place of the first record of which the chat template leaves this out."""
    from chunkplan.planfile.analysis import record_place

    source = next(source for source in sources if kind in source["first_left_out"])
    return record_place(_name(source), source["format"], source["first_left_out"][kind])


def _name(source: SourceEntry) -> str:
    return "the standard input" if source["path"] == _STDIN else source["path"]


def _several(names: list[str], number: int) -> str:
    """Join the first of a number of names, and say how many more there are."""
    return ", ".join(names) + (f" and {number - len(names):,} more" if number > len(names) else "")


def _beside(text: str, more: str) -> list[str]:
    """Return lines with `more` beside `text` where the terminal has room for it, else below."""
    width = stderr().width
    if len(text) + 1 + len(more) <= width:
        return [f"{text} {more}"]
    return [text, *_indented(more)]


def _indented(text: str) -> list[str]:
    return wrap(
        text,
        stderr().width,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _say_what_it_is_good_for(analysis: Analysis) -> None:
    if not analysis.is_exact:
        warn("no tokenizer: lengths are estimated and no tokens are stored, enough to plan but not to train")
        note('hint: give --tokenizer FILE, set CHUNKPLAN_TOKENIZER, or put tokenizer = "FILE" in workspace.toml')
    elif analysis.manifest["sample"]:
        warn(
            f"a sample of {100 * analysis.manifest['sample']:g}%: enough to plan roughly, nothing of it can be trained"
        )
    elif not analysis.has_tokens:
        warn("lengths only, no tokens are stored: enough to plan but not to train")


def print_length_report(console: Console, report: LengthReport, analysis: Analysis) -> None:
    """Print `report`, and what `analysis`, which it is of, says of records rejected and sequences cut."""
    if report.sample is not None:
        message = f"A SAMPLE of {100 * report.sample:g}% of the records; ranges hold in 95 of 100 samples."
        console.print(Text(message, style="bold yellow"))
        console.print()
    if not report.exact:
        message = "ESTIMATED from bytes, no tokenizer: every 4 bytes are taken for one token."
        console.print(Text(message, style="bold yellow"))
        console.print()
    console.print(_totals(report, analysis))
    console.print()
    for table in (_cumulative(report), _histogram(report), _tails(report)):
        caption = table.caption if report.exact else f"{table.caption} (estimated)"
        console.print(drawn_table(console, replace(table, caption=caption)))
        console.print()
    console.print("* attention: the sum of squared lengths")
    console.print(f"Padded to the longest, {_share(report.padding_share)} of what is computed would be padding.")


def _totals(report: LengthReport, analysis: Analysis) -> RichTable:
    table = RichTable.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    estimated = "" if report.exact else "estimated"
    trained = ~analysis.is_evaluation
    lengths, num_targets = analysis.num_tokens[trained], int(analysis.num_target_tokens[trained].sum())
    num_tokens, others = int(lengths.sum()), report.num_sequences - lengths.size
    table.add_row("sequences", f"{lengths.size:,}", _join(_in_all(report.all_sequences), _dropped(report, analysis)))
    table.add_row("tokens", f"{num_tokens:,}", _join(_in_all(report.all_tokens), estimated))
    if analysis.has_tokens or not report.exact:
        targets = _share(num_targets / max(num_tokens, 1))
        table.add_row("target tokens", f"{num_targets:,}", estimated or f"{targets} of the tokens")
    table.add_row("mean length", f"{num_tokens / max(lengths.size, 1):,.0f}", estimated)
    if others:
        words = f"more sequences, {report.num_tokens - num_tokens:,} tokens; the tables have them too"
        table.add_row("evaluation", f"{others:,}", words)
    return table


def _in_all(estimate: Estimate | None) -> str:
    """Return the estimate for all data in words."""
    return f"in all {estimate.value:,} ({estimate.low:,}-{estimate.high:,})" if estimate else ""


def _join(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _dropped(report: LengthReport, analysis: Analysis) -> str:
    """Return notes on records that were rejected or cut, and on sequences without a target."""
    rejected: dict[str, int] = analysis.manifest.get("rejected", {})
    reasons = [f"{count:,} {reason}" for reason, count in rejected.items()] if len(rejected) > 1 else rejected
    notes = [f"{sum(rejected.values()):,} rejected: {', '.join(reasons)}"] if rejected else []
    truncated: dict[str, int] = analysis.manifest.get("truncated", {"num_sequences": 0})
    if truncated["num_sequences"]:
        notes.append(f"{truncated['num_sequences']:,} cut by {truncated['num_tokens']:,} tokens")
    if report.num_without_target:
        notes.append(f"{report.num_without_target:,} without a target token")
    return "; ".join(notes)


def _cumulative(report: LengthReport) -> Table:
    """List quantiles beside the share of sequences below round lengths: two views of one curve, so one table."""
    is_sample = report.sample is not None
    rows = [
        (
            *("longest" if quantile.share == 1 else f"{100 * quantile.share:g}%", f"{quantile.num_tokens:,}"),
            *([_range(quantile)] if is_sample else []),
            *(power_of_two(band.high), _share(band.num_sequences / report.num_sequences)),
            _share(band.num_tokens / report.num_tokens),
        )
        for quantile, band in zip(report.quantiles, report.cumulative, strict=True)
    ]
    between = ["between"] if is_sample else []
    return Table("Lengths", ("quantile", "tokens", *between, "shorter than", "of sequences", "of tokens"), rows)


def _range(quantile: Quantile) -> str:
    """Return the interval of lengths of a quantile of all data; for the longest only its lower end is known."""
    low = quantile.num_tokens if quantile.share == 1 else quantile.low
    return f"{'?' if low is None else f'{low:,}'}-{'?' if quantile.high is None else f'{quantile.high:,}'}"


def _histogram(report: LengthReport) -> Table:
    rows = [
        (
            *(power_of_two(band.low), power_of_two(band.high), f"{band.num_sequences:,}"),
            *(_share(band.num_sequences / report.num_sequences), _share(band.num_tokens / report.num_tokens)),
        )
        for band in report.histogram
    ]
    bars = {"share": [band.num_sequences for band in report.histogram]}
    bars["of tokens"] = [band.num_tokens for band in report.histogram]
    return Table("Histogram", ("from", "below", "sequences", "share", "of tokens"), rows, bars=bars)


def _tails(report: LengthReport) -> Table:
    rows = []
    for name, tail in (("over 8K", report.over_8k), ("longest 1%", report.longest_1_percent)):
        shares = (tail.sequence_share, tail.token_share, tail.attention_share)
        rows.append((name, f"{tail.low:,}", f"{tail.num_sequences:,}", *map(_share, shares)))
    return Table("The tail", ("", "from", "sequences", "share", "of tokens", "of attention*"), rows, texts=("",))


def _share(share: float) -> str:
    """Print a percentage; what is not all or nothing is never rounded to it."""
    if 0 < share < 0.001:
        return "<0.1%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{100 * share:.1f}%"
