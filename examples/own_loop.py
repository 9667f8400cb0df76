"""A training loop of one's own: python own_loop.py PLAN CONFIG.json CHECKPOINT.pt [STEPS], again to go on."""

import sys
from itertools import islice
from pathlib import Path

import torch

from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.models.model import new_model, read_config

if not 4 <= len(sys.argv) <= 5:
    sys.exit(__doc__)
plan, config_file, checkpoint = (Path(argument) for argument in sys.argv[1:4])
config = read_config(config_file)
model = new_model(config, torch.float32, seed=0)
optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-3)
stream = PlanStream(*open_plan(plan), vocab_size=config.vocab_size, max_positions=config.max_position_embeddings)
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    model.model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    stream.load_state_dict(saved["stream"])
at_most = int(sys.argv[4]) if len(sys.argv) > 4 else None

executor = RankExecutor(model)
for work in islice(stream, at_most):
    loss = sum(executor.run(rank, work.step.num_target_tokens).loss for rank in work.ranks)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {work.step.step}  loss {loss:.6f}", flush=True)

states = {"model": model.model.state_dict(), "optimizer": optimizer.state_dict(), "stream": stream.state_dict()}
torch.save(states, checkpoint)
