"""What a run did and what this machine can do: stats, compare, report, env."""
