"""Analyses for tests of what a plan takes of one."""

from __future__ import annotations

import numpy as np
import pytest

from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.load import load_analysis


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """`make(texts by path)` -> an analysis of them; a text is a list of token ids."""

    def make(**sources):
        folder = tmp_path_factory.mktemp("analysis")
        writer = AnalysisWriter(folder)
        for source, texts in enumerate(sources.values()):
            for record, text in enumerate(texts):
                writer.add(source, record, np.array(text, np.int32), np.arange(len(text)) > 0)
        described = [{"path": f"data/{name}.jsonl", "records": len(texts)} for name, texts in sources.items()]
        described = [{**source, "schema": None} for source in described]
        writer.finish(exact=True, sources=described)
        return load_analysis(folder)

    return make


@pytest.fixture(scope="module")
def make_lengths(tmp_path_factory):
    """`make_lengths(n)` -> a lengths file of n sequences."""

    def make_lengths(num_sequences):
        path = tmp_path_factory.mktemp("lengths") / "lengths.npy"
        np.save(path, np.full(num_sequences, 7))
        return load_analysis(path)

    return make_lengths
