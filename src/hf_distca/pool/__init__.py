"""A pool of attention servers: processes that train nothing and compute slices of core attention
for the ranks that train.
"""
