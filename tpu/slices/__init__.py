"""Slices from request to confirmed deletion: names, life, verdicts, budgets, provisioning."""
