"""Evaluation: what is measured on held-out tasks, its intervals, and the verdict."""
