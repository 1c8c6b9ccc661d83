"""Seeded histories of trouble for real runs, and a judge of how each ended."""
