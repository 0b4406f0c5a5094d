"""Estimates what hf-distca would gain on a user's documents, without a GPU and without loading a
model.
"""
