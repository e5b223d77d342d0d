"""Engines: token ids in, sampled token ids with log-probabilities out."""
