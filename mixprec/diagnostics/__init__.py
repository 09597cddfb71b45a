"""Diagnostics of training runs: memory_report, plan, audit, what casts lose."""

__all__ = ["memory_report"]
