"""`ChunkTrainer`: the `Trainer` of transformers with a plan's steps for its training steps."""
