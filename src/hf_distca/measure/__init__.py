"""Times attention kernels and links: calibrated cost models, and profiles of machines."""
