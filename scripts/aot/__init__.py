"""What Triton makes of the kernels, without a GPU."""
