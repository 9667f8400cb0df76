#!/usr/bin/env bash
# The main job on sample_data/, offline: look at the lengths, train with a plan, inspect it, check gradients, and what a
# plan would gain.
set -euo pipefail
cd "$(dirname "$0")"
started=$SECONDS
export HF_HUB_OFFLINE=1

bold='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$'\033[1m' plain=$'\033[0m'; fi
say() { printf '\n%s== %s%s\n' "$bold" "$*" "$plain"; }
run() { printf '$ %s\n' "$*"; "$@"; }

say "1. How long are the sequences? (1,030 real records, four schemas)"
run chunkplan analyze sample_data --tokenizer sample_data/tokenizer

say "2. Train: a tiny model with random weights on this CPU, sequences cut at 4096 tokens, chunks of 1024"
export CHUNKPLAN_WORKSPACE=chunkplan-out/demo
run chunkplan analyze sample_data --tokenizer sample_data/tokenizer --max-length 4096 --json >/dev/null
run chunkplan build --chunk-size 1024 --k 2 --global-batch 16 --model sample_data/model
rm -rf chunkplan-out/demo/run
run chunkplan train --model-config sample_data/model --max-steps 3 --lr 1e-3 --warmup 0

say "3. Look at one step of its plan, and check every invariant of its files"
run chunkplan inspect --step 1
run chunkplan validate
unset CHUNKPLAN_WORKSPACE

say "4. Are the gradients exact? Chunks of 64 tokens against whole sequences, in float64"
run chunkplan parity --model sample_data/model/config.json --lengths 300,70,50 --chunk-size 64 --k 2

say "5. What would a plan gain for adapters of Qwen2.5-7B on 8 L40S, against the ways that people train today?"
run chunkplan gain --gpus 8xL40S --lora-rank 16

say "Done in $((SECONDS - started)) s"
cat <<'END'
chunkplan-out/analysis       lengths, tokens and target masks of sample_data
chunkplan-out/gain.html      the ways to train as bars, if the extra `report` is installed
chunkplan-out/demo/plan      the plan of step 2: Parquet, readable by anything
chunkplan-out/demo/run       metrics.jsonl and the trained weights (final/)

Next, on your own data:
  source .venv/bin/activate
  chunkplan gain dataset.jsonl --tokenizer path/to/tokenizer.json --model path/to/model --gpus 8xH100
  chunkplan build --auto
  chunkplan inspect
  chunkplan train --model path/to/model
END
