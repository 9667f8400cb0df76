"""The trainer: a run from its options to a saved model, one optimizer step a step of the plan."""
