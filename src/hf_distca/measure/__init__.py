"""Timings of attention kernels and links: calibrated cost models, and profiles of machines."""
