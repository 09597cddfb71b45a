"""What the ops share: their definition, the choice of a variant, checks."""
