"""Intake: data files -> records -> token ids and target masks -> an analysis."""
