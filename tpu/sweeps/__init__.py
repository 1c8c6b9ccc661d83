"""Sweeps: a search space, the trials that come of it, and what is known of each. No Prefect, no cloud."""
