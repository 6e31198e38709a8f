"""The benchmark of decoding with keys and values in host memory."""
