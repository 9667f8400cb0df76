"""Fine-tuning by transformers, in chunks: python chunk_trainer.py MODEL PLAN OUTPUT, again to go on."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, TrainingArguments

from chunkplan.errors import ChunkplanError
from chunkplan_runtime import ChunkTrainer

if len(sys.argv) != 4:
    sys.exit(__doc__)
name, plan, output = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False, use_safetensors=True)
args = TrainingArguments(
    output_dir=output,
    learning_rate=1e-5,
    lr_scheduler_type="cosine",
    logging_steps=1,
    save_steps=100,
    save_total_limit=2,
    report_to="none",
)
try:
    trainer = ChunkTrainer(model, args=args, plan=plan)
    trainer.train(resume_from_checkpoint=any(Path(output).glob("checkpoint-*")))
    if trainer.eval_dataset is not None:
        metrics = trainer.evaluate()
        if trainer.is_world_process_zero():
            print(metrics)
except ChunkplanError as error:
    print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
    sys.exit(error.exit_code)
trainer.save_model(str(Path(output) / "final"))
