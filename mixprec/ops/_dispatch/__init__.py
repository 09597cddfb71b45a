"""What the ops share: definition, choice of a variant, checks. Nothing in here is an op."""
