"""Whether a quantizer computes a spec: see `check.conform`."""
