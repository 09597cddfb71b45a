"""Adapters to other trainers, one module each, named after the package that it needs:

    from mixprec.integrations.transformers import Trainer
    from mixprec.integrations.accelerate import attach
    from mixprec.integrations.lightning import MixprecPrecision
    from mixprec.integrations.torchtitan import MixprecConverter

Importing this package imports none of them.
"""

__all__: list[str] = []  # its modules, which need other packages, are imported by name
