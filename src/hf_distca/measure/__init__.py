"""Timings of attention kernels and links: calibrated cost models, and profiles of machines.

May import `schedule`, `kernels` and `runtime`.
"""
