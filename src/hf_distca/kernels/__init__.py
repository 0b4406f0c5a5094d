"""Attention kernels: one file a backend, one signature."""
