"""Policies: loading models, rendering messages to tokens and back, running their layers."""
