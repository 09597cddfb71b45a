"""What the references of several ops share: formats, roundings, products, in plain torch."""
