"""Where the text on a page is from."""

from __future__ import annotations

from dataclasses import dataclass

from chunkplan.intake.tokenizer import RecordTokenizer
from chunkplan.planfile.analysis import Analysis


@dataclass(frozen=True)
class TextSource:
    """An analysis and what decodes its tokens; without a tokenizer, `why_not` in words, None if nobody expects text."""

    analysis: Analysis | None = None
    tokenizer: RecordTokenizer | None = None
    why_not: str | None = None
