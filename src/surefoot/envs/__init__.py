"""Environments: the interface, and the ones that ship with Surefoot."""
