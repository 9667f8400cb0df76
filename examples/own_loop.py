"""A training loop of one's own: python own_loop.py MODEL PLAN OUTPUT [STEPS], again to go on."""

import sys
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from chunkplan.errors import ChunkplanError
from chunkplan_runtime import Executor

if not 4 <= len(sys.argv) <= 5:
    sys.exit(__doc__)
name, plan, output = sys.argv[1:4]
at_most = int(sys.argv[4]) if len(sys.argv) > 4 else None
state = Path(output) / "loop.pt"

source = output if state.exists() else name
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=False, use_safetensors=True)
model.train().to("cuda" if torch.cuda.is_available() else "cpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
try:
    executor = Executor.from_model(model)
    stream = executor.stream(plan)
    if state.exists():
        saved = torch.load(state, weights_only=True)
        optimizer.load_state_dict(saved["optimizer"])
        stream.load_state_dict(saved["stream"])
    for work in islice(stream, at_most):
        loss = executor.step(work)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {work.step.step}  loss {loss:.6f}", flush=True)
except ChunkplanError as error:
    print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
    sys.exit(error.exit_code)

model.save_pretrained(output)
torch.save({"optimizer": optimizer.state_dict(), "stream": stream.state_dict()}, state)
