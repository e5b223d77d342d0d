"""Rollouts: the episode loop and the scheduler that runs many of them."""
