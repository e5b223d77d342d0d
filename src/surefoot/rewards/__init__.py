"""Rewards with trust tiers and their strict composition."""
