"""Diagnostics of a training run and of this machine: stats, compare, report, env."""

__all__ = ["compare", "env", "plotting", "report", "stats", "training_run"]
