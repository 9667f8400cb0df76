"""verl's actor in chunks: class Actor(InChunks, DataParallelPPOActor), whose updates have memory of chunks.

The rest of verl's actor stays: its losses, mini-batches, KL terms and optimizer. Its model has to be whole on each
process, and not wrapped by FSDP.
"""

import torch

from chunkplan_runtime import Executor

CHUNK_SIZE, K = 8192, 2


class InChunks:
    """The part of an actor that has a model compute log-probabilities of a micro-batch."""

    _executor = None

    def _forward_micro_batch(self, micro_batch, temperature, calculate_entropy=False):
        """Entropies and log-probabilities of the responses, [rows, response tokens] each."""
        if self._executor is None:
            self._executor = Executor.from_model(self.actor_module, router_loss="none")
        num_tokens = micro_batch["responses"].shape[1]
        is_there = micro_batch["attention_mask"].bool()  # prompts are padded on the left, responses on the right
        is_response = is_there.clone()
        is_response[:, :-num_tokens] = False
        sequences = [row[there] for row, there in zip(micro_batch["input_ids"], is_there, strict=True)]
        targets = [row[there] for row, there in zip(is_response, is_there, strict=True)]
        how = {"chunk_size": CHUNK_SIZE, "k": K, "temperature": temperature, "share_prefixes": True}
        with torch.autocast(is_there.device.type, dtype=torch.bfloat16, enabled=is_there.is_cuda):
            found = self._executor.log_probs(sequences, targets, **how)
        mask = is_response[:, -num_tokens:]
        log_probs, entropies = (
            values.new_zeros(mask.shape).masked_scatter(mask, values) for values in (found.log_probs, found.entropies)
        )
        return (entropies if calculate_entropy else None), log_probs
