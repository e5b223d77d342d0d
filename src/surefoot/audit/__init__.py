"""Checks of environments and rewards by what can go wrong with them, without any model."""
