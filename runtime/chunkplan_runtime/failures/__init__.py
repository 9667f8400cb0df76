"""What torchrun and NCCL do not tell of a job: which process is lost or stalled, and who waits where for it."""
