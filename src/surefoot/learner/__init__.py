"""The learner: packs trajectories, recomputes their log-probabilities, updates the weights."""
