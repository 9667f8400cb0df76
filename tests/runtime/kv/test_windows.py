"""Of how many tokens layers with a window have gradients of keys and values at once."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import shape_of_config
from chunkplan.cost.token_bytes import key_gradients
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.models.model import new_model

CHUNK, NUM_CHUNKS = 8, 24


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("window", [8, 20, 32, 70])
def test_no_more_tokens_have_gradients_than_the_planner_counts(
    tiny_config, handmade_plan, random_sequences, monkeypatch, window, k
):
    """And in some moment as many, but for a page."""
    config = tiny_config("mistral", sliding_window=window)
    chunks = [[(0, start, start + CHUNK)] for start in range(0, NUM_CHUNKS * CHUNK, CHUNK)]
    plan = handmade_plan(random_sequences([NUM_CHUNKS * CHUNK]), [{0: chunks}], k=k)
    stores = []
    counts = []
    make, blocks = KVStore.__init__, KVStore.blocks

    def made(store, *args, **options):
        make(store, *args, **options)
        stores.append(store)

    def counted(own, *args):
        for block in blocks(own, *args):
            layers = [pages for store in stores for each in store._sequences.values() for pages in each.layers.values()]
            counts.append(max(sum(page.capacity for page in pages if page.gradients) for pages in layers))
            yield block

    monkeypatch.setattr(KVStore, "__init__", made)
    monkeypatch.setattr(KVStore, "blocks", counted)
    model = new_model(AutoConfig.for_model(**config), torch.float64, seed=3)
    work = next(iter(PlanStream(*open_plan(*plan), vocab_size=97, max_positions=256)))
    RankExecutor(model).run(work.ranks[0], work.step.num_target_tokens)
    shape = shape_of_config(config, "a test")
    [predicted] = key_gradients(CostModel(shape=shape), [(shape.kinds[0], 2)], CHUNK, 1)
    assert predicted.most_tokens - 4 * CHUNK <= max(counts) <= predicted.most_tokens < NUM_CHUNKS * CHUNK
