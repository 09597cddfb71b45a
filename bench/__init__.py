"""mixprec.bench: how fast every op is beside its baselines, checked before it is timed.

Run it as `python -m mixprec.bench`. The source lies in bench/ and is installed under mixprec.
"""

if __name__ != "mixprec.bench":
    raise ImportError(
        f"this folder is the source of mixprec.bench and cannot be imported as {__name__!r}; "
        "install mixprec (pip install -e .), then use mixprec.bench"
    )
