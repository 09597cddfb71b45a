"""dequantize_mx: the values of all codes and scales."""
