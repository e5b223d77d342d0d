"""Policies: loading models, rendering messages to tokens and back, running their layers."""

import os

# Read by the OpenMP runtime when torch loads it: a thread that waits for a busy core gives the other
# core up after microseconds. The default spins for milliseconds and collapses on a machine in use.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
# Read by the matrix library at its first product: the same sums in the same order in every run. Without
# it, equal products may differ in their last bits from run to run, and a resumed run from a straight one.
os.environ.setdefault("MKL_CBWR", "AUTO")
