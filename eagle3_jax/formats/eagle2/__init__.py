"""Heads of EAGLE and EAGLE-2 on disk, and the token maps that cut their vocabulary."""
