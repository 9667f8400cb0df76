"""Diagnosis that torchrun and NCCL do not give: which process is lost or stalled, and who waits where for it."""
