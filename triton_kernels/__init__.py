"""mixprec.triton_kernels: the ops as Triton kernels; in a file one op, or some that share kernels.

The GPU path of an installation without nvcc. The source is in triton_kernels/ and is installed
under mixprec, because other projects install a package of that name.
"""

if __name__ != "mixprec.triton_kernels":
    raise ImportError(
        f"this folder is the source of mixprec.triton_kernels and cannot be imported as "
        f"{__name__!r}; install mixprec (pip install -e .), then use "
        "mixprec.triton_kernels"
    )
